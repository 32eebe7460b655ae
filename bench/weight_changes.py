"""How much of a model of 1.5B parameters changes in a step of AdamW at an RL learning rate, and
what does sending only that cost and save?

bf16 weights, AdamW on fp32 masters (lr 1e-6). Each step trains, publishes the changes, and
publishes everything, by turns. A receiver that writes only the changes is compared with the whole
publication, bit by bit, for 20 steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

import placement
from bench import _rig
from bench._models import Weights
from bench._results import Results
from bench._rig import Rig
from placement.policies import Colocated

_SCENARIO = "AdamW, lr 1e-6, bf16"


class _Adam(torch.optim.Optimizer):
    """Adam on fp32 masters. Its steps have the size of Adam's at a learning rate of 1e-6."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})
        for parameter in parameters:
            self.state[parameter] = {"master": parameter.detach().float()}

    def update(self) -> None:
        """A step. Adam's update is at most the learning rate: all of it where the gradient's sign
        is steady, less where it is noise."""
        with torch.no_grad():
            for parameter, state in self.state.items():
                master = state["master"]
                master.add_(torch.randn_like(master).clamp_(-1, 1), alpha=-1e-6)
                parameter.copy_(master)


class _Job:
    """The model and what steps it, whose masters stay on the device."""

    def __init__(self, rig: Rig) -> None:
        torch.manual_seed(0)
        hidden, layers = rig.pick(64, 2048, 2048), rig.pick(2, 20, 30)
        shapes = (
            [(hidden, hidden)] * 4 * layers
            + [(4 * hidden, hidden), (hidden, 4 * hidden)] * layers
            + [(hidden,)] * 2 * layers
        )
        self.model = Weights(rig, shapes)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(0.02).requires_grad_(True)
        self.optimizer = _Adam([*self.model.parameters()])
        self.manager = placement.Manager(device=rig.placement_device(), policy=Colocated())
        self.handle = self.manager.register("actor", self.model, role="actor")
        self.stepper = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.manager.register("optimizer", self.stepper)  # a phase "train" loads what is trained

    def step(self) -> None:
        self.optimizer.update()


class _Receiver:
    """Has the weights of a rollout, and writes what comes."""

    def __init__(self, rig: Rig, job: _Job) -> None:
        self._rig, self._handle = rig, job.handle
        self.weights = {
            info.name: torch.empty(info.shape, dtype=info.dtype, device=rig.torch_device)
            for info in job.handle.weights_info()
        }
        self.version: int | None = None
        self.is_equal = True

    def sync(self) -> tuple[float, int, int]:
        """Write one publication. Returns its seconds, bytes and elements."""
        self._rig.sync()
        began, nbytes, count = time.perf_counter(), 0, 0
        for bucket in self._handle.weight_changes(since=self.version):
            for change in bucket:
                change.write_into(self.weights[change.name])
                nbytes += change.nbytes
                count += change.values.numel()
            self.version = bucket.version
        self._rig.sync()
        return time.perf_counter() - began, nbytes, count

    def compare(self) -> None:
        for bucket in self._handle.weights():
            self.is_equal &= all(
                bool(tensor.view(torch.int16).equal(self.weights[name].view(torch.int16)))
                for name, tensor in bucket
            )


def measure(rig: Rig, results: Results) -> None:
    job = _Job(rig)
    receiver = _Receiver(rig, job)
    whole_bytes = sum(tensor.nbytes for tensor in receiver.weights.values())
    sent, elements, taken, whole = list[int](), list[int](), list[float](), list[float]()
    for index in range(rig.pick(3, 10, 21)):
        job.manager.enter("train")
        job.step()
        job.manager.switch("weight_sync")
        seconds, nbytes, count = receiver.sync()
        whole.append(rig.seconds(lambda: [bucket.clear() for bucket in job.handle.weights()]))
        receiver.compare()
        job.manager.leave()
        if index:
            sent.append(nbytes)
            elements.append(count)
            taken.append(seconds)
    num_elements = sum(tensor.numel() for tensor in receiver.weights.values())
    results.add(_SCENARIO, "placement", "elements", num_elements, "")
    results.add(
        _SCENARIO,
        "placement",
        "elements that changed in a step",
        100 * statistics.median(elements) / num_elements,
        "%",
    )
    results.add(_SCENARIO, "placement", "changes, bytes to send", statistics.median(sent), "bytes")
    results.add(_SCENARIO, "placement", "everything, bytes to send", whole_bytes, "bytes")
    results.add(_SCENARIO, "placement", "changes, found and written", statistics.median(taken), "s")
    results.add(_SCENARIO, "placement", "everything, read", statistics.median(whole), "s")
    results.add(
        _SCENARIO,
        "placement",
        "receiver's bits are the whole publication's, every step",
        receiver.is_equal,
        "yes=1",
    )
    results.add(
        _SCENARIO,
        "placement",
        "kept of a publication",
        8 * sum(len(r.chunk_sizes) for r in job.handle.storage.ranges),
        "bytes",
    )
    job.manager.close()


def main(arguments: Sequence[str] | None = None) -> None:
    _rig.run("weight_changes", __doc__, measure, arguments)


if __name__ == "__main__":
    main()
