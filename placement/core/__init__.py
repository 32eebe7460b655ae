"""The ground layer: states, the state machine, the journal, snapshots, errors and settings. It imports no other folder of placement.

Whatever is imported of placement imports this folder, also where OpenStack's `placement/__init__.py` has taken the place of ours.
"""

import os

__version__ = "0.1.0"
"""The one place that says it."""

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if os.path.exists(os.path.join(_PACKAGE, "deploy.py")):
    raise ImportError(
        f"OpenStack's openstack-placement has put files into the same folder {_PACKAGE}, and has replaced or will replace files of "
        "placement-rl. Give each an environment of its own. In this one: pip uninstall openstack-placement, then reinstall placement-rl "
        "(pip install --force-reinstall --no-deps . in a checkout), because pip has also removed files of the same name"
    )
