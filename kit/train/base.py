"""The frozen weights of the decoder's linear layers under LoRA, in 8 or 4 bits (model.base fp8 and nf4).

fp8: each weight is e4m3 with one scale for each of its rows, and so are the inputs and the gradients that it is
multiplied with. That is another function than bf16, as QLoRA's is: gradients are off by some 20 to 30 %. nf4 is QLoRA
by bitsandbytes: normal floats of 4 bits, whose scales are quantised once more. The LM head stays as it is.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import Linear, Module
from torch.nn.parallel import DistributedDataParallel

from kit.errors import InputError, KitError
from kit.train import device
from kit.train.compile import decoder_layers

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
SMALLEST_SCALE = 1e-12  # a row of zeros
MULTIPLE = 16
CHECKED = 256  # rows and columns of the layer of the check before training
FP8_ROUNDING = 0.1  # largest error of its gradient that is rounding; 0.04 is what e4m3 gives
NF4: dict[str, Any] = {"quant_type": "nf4", "compress_statistics": True}  # the second one quantises the scales


def quantise_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 values of shape (rows, columns), and fp32 scales of shape (rows, 1): their product is what was given."""
    scale = (rows.abs().amax(-1, keepdim=True).float() / LARGEST).clamp(min=SMALLEST_SCALE)
    return (rows.float() / scale).to(E4M3), scale


def multiply(
    left: torch.Tensor, left_scale: torch.Tensor, right: torch.Tensor, right_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """left @ right.t() of e4m3 matrices whose rows have scales, in `dtype`; by the tensor cores of GPUs, or in fp32.

    Both matrices have their rows contiguous, as cuBLAS wants the operands of fp8 matmuls. A conversion to the type that
    a tensor has already is left out: it returns the tensor itself, and where the forward of an autograd.Function
    returns such a tensor, dynamo of torch 2.11 loses its gradient (https://github.com/pytorch/pytorch/issues/180642).
    """
    if left.is_cuda:
        scales = {"scale_a": left_scale, "scale_b": right_scale.t()}
        out = torch._scaled_mm(left, right.t(), out_dtype=torch.bfloat16, use_fast_accum=True, **scales)
    else:
        out = (left.float() * left_scale) @ (right.float() * right_scale).t()
    return out if out.dtype == dtype else out.to(dtype)


class Fp8Product(torch.autograd.Function):
    """inputs @ weight.t(), for a frozen weight in fp8 and inputs that are rounded to it."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """inputs: (..., in); weight: e4m3 (out, in); scale: (out, 1). Returns (..., out) in the type of the inputs."""
        ctx.save_for_backward(weight, scale)
        rows, row_scale = quantise_rows(inputs.reshape(-1, inputs.shape[-1]))
        out = multiply(rows, row_scale, weight, scale, inputs.dtype)
        return out.view(*inputs.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """The gradient of the inputs, from the same fp8 weights.

        Their scales belong to the dimension that is summed over, so they are multiplied into the gradient before that
        is rounded. The transposed copy of the weights is made for each call: kept, it would take as much again.
        """
        weight, scale = ctx.saved_tensors
        rows, row_scale = quantise_rows(grad.reshape(-1, grad.shape[-1]).float() * scale.t())
        one = torch.ones(weight.shape[1], 1, device=weight.device)
        out = multiply(rows, row_scale, weight.t().contiguous(), one, grad.dtype)
        return out.view(*grad.shape[:-1], weight.shape[1]), None, None


class Fp8Linear(Module):
    """A frozen linear layer whose weight is in fp8.

    The weight is a buffer, not a parameter, and is not saved, as nothing frozen is under LoRA.
    """

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight, scale = quantise_rows(linear.weight.detach())
        self.weight: torch.Tensor
        self.scale: torch.Tensor
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self.bias = linear.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """inputs: (..., in_features); returns (..., out_features)."""
        if torch.is_autocast_enabled(inputs.device.type):
            inputs = inputs.to(torch.get_autocast_dtype(inputs.device.type))
        out: torch.Tensor = Fp8Product.apply(inputs, self.weight, self.scale)  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + self.bias.to(out.dtype)


def use_fp8(model: Any) -> int:
    """Put the frozen linear layers of the decoder into fp8, those under adapters included. Returns how many.

    Call it after the adapters are there, since PEFT adapts no other layers than it knows, and before the model moves to
    the GPU: each layer moves by itself, so that the model is never there in 16 bits.
    """
    count = replace_linears(model, lambda linear: Fp8Linear(linear.to(device.kind())) if _fits_fp8(linear) else linear)
    weights = [name for name, buffer in model.named_buffers() if buffer.dtype == E4M3]
    # They are equal on all ranks, and not every backend of torch.distributed sends float8.
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, weights)  # type: ignore[no-untyped-call]
    return count


def check_fp8_gradient(compiled: bool) -> float:
    """The relative error of the gradient that one fp8 layer passes on, compiled as in training or not.

    A lost gradient would not show in the losses, which fall all the same. Raises KitError where the error is more than
    rounding.
    """
    with device.kept_random_state(), torch.device(device.kind()):
        torch.manual_seed(0)
        linear = Linear(CHECKED, CHECKED, bias=False, dtype=torch.bfloat16)
        inputs = torch.randn(CHECKED, CHECKED, dtype=torch.bfloat16, requires_grad=True)
        gradient = torch.randn(CHECKED, CHECKED, dtype=torch.bfloat16)
    layer = Fp8Linear(linear)
    forward = torch.compile(layer.forward) if compiled else layer.forward
    torch.autograd.backward(forward(inputs), gradient)
    found = torch.zeros_like(inputs) if inputs.grad is None else inputs.grad
    exact = gradient.float() @ linear.weight.detach().float()
    error = float((found.float() - exact).norm() / exact.norm())
    if not error < FP8_ROUNDING:  # NaN is an error as well
        how, instead = ("compiled", "parallel.compile to off") if compiled else ("not compiled", "model.base to bf16")
        raise KitError(
            f"A layer of model.base fp8, {how}, passes on a gradient that is wrong by {error:.0%} with torch "
            f"{torch.__version__}. Set {instead}."
        )
    return error


def _fits_fp8(linear: Linear) -> bool:
    """Whether both sides of the weight have the multiple of elements that fp8 matmuls take."""
    return linear.in_features % MULTIPLE == 0 and linear.out_features % MULTIPLE == 0


def use_nf4(model: Any, sharded: bool = False) -> int:
    """Put the linear layers of the decoder into nf4, by bitsandbytes, before PEFT adapts them. Returns how many.

    sharded: for FSDP2. Raises InputError where bitsandbytes is not installed.
    """
    require_bitsandbytes()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return replace_linears(model, lambda linear: _in_nf4(linear, sharded))


def require_bitsandbytes() -> None:
    """Raises InputError where bitsandbytes is not installed."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise InputError("tuning.method qlora needs bitsandbytes where the job runs: pip install bitsandbytes.")


def nf4_layer(linear: Linear, sharded: bool) -> Any:
    """bitsandbytes' 4-bit layer for a linear layer, without its weight. sharded: for FSDP2."""
    from bitsandbytes.nn import Linear4bit

    compute = torch.bfloat16 if torch.cuda.is_available() else linear.weight.dtype
    # accelerate does not shard integers, and FSDP2 would convert another float than the one it computes in.
    storage = compute if sharded else torch.uint8
    shape = (linear.in_features, linear.out_features)
    new = Linear4bit(*shape, bias=False, compute_dtype=compute, quant_storage=storage, device="meta")
    new.bias = linear.bias
    # Its kernel for evaluations on CPUs computes in bf16, and packs the weights again in place, but not their shards.
    new.support_avx512bf16_for_cpu = False
    return new


def _in_nf4(linear: Linear, sharded: bool) -> Module:
    from bitsandbytes.nn import Params4bit

    new = nf4_layer(linear, sharded)
    options = {"requires_grad": False, "quant_storage": new.quant_storage, "module": new} | NF4
    new.weight = Params4bit(linear.weight.detach(), **options)
    return new.to(device.kind())  # type: ignore[no-any-return]  # which quantises


def check_nf4_shards() -> None:
    """Compare the output of one nf4 layer before and after FSDP2 shards it as in training. All ranks call it together.

    Its packed weights, read as floats, hold NaN of many kinds, as those of a model do. Raises KitError on every rank
    where the outputs are not equal in every bit: a copy has changed such words, as those of torch's all-gather do on
    GPUs (https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1945).
    """
    compute = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    with device.kept_random_state():
        torch.manual_seed(0)
        layer = torch.nn.Sequential(_in_nf4(Linear(CHECKED, CHECKED, bias=False, dtype=compute), sharded=True))
        inputs = torch.randn(CHECKED, CHECKED, dtype=compute, device=device.kind())
    layer.requires_grad_(False)
    with torch.no_grad():
        before = layer(inputs)
        policy = MixedPrecisionPolicy(param_dtype=compute)
        fully_shard(layer, mesh=init_device_mesh(device.kind(), (PartialState().num_processes,)), mp_policy=policy)
        differs = torch.tensor(float(not torch.equal(before, layer(inputs))), device=device.kind())
    if reduce(differs, "sum").item():
        raise KitError(
            "Sharded 4-bit weights do not give the outputs of unsharded ones with this release of torch and "
            "bitsandbytes (bitsandbytes#1945). Set parallel.strategy to ddp, or tuning.method to lora."
        )


def replace_linears(model: Any, make: Callable[[Linear], Any]) -> int:
    """Replace each frozen torch.nn.Linear of the decoder; layers of adapters are trained and stay."""
    count = 0
    for layer in decoder_layers(model):
        for parent in list(layer.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is Linear and not child.weight.requires_grad:
                    new = make(child)
                    setattr(parent, name, new)
                    count += new is not child
    return count
