"""Training frameworks, one file each: the tensors behind its wrappers, those that may move, and how
its weights are published."""

from placement.frameworks.base import SHIPPED
from placement.frameworks.deepspeed import DeepSpeed
from placement.frameworks.fsdp1 import FSDP1
from placement.frameworks.fsdp2 import FSDP2, VeOmni
from placement.frameworks.low_precision import Bitsandbytes, TorchAO, TransformerEngine
from placement.frameworks.megatron import Megatron, MegatronFSDPShards
from placement.frameworks.peft import PEFT
from placement.frameworks.pytorch import DDP, Accelerate, TorchWrappers

SHIPPED += (FSDP2, Megatron, MegatronFSDPShards, DDP, FSDP1, DeepSpeed, Bitsandbytes, VeOmni)
SHIPPED += (TransformerEngine, TorchAO, Accelerate, PEFT, TorchWrappers)
