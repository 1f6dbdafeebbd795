"""What plans predict of memory, against what a rank has in use: the peak of a training step on CPU processes.

In: nothing. Out: a Markdown table on standard output. Each model trains with its loss inside and an optimizer of torch;
the step that is measured is the third, when optimizer states are there. Memory is counted by watching every operation
for the tensors that it makes and the moments at which they are freed, so scratch memory inside of an operation and the
buffers of the process group are not in it. Every rank is measured, and the largest is compared.

    python benchmarks/memory.py [--only gpt2]
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fxpar
from fxpar.assemble import assemble, random_choice
from fxpar.capture import capture
from fxpar.capture.recorder import Allocations
from fxpar.cluster import Cluster
from fxpar.cost.memory import memory
from fxpar.cost.price import price
from fxpar.layout import Mesh
from fxpar.plans import Memory, Plan
from fxpar.processes import run_ranks
from fxpar.runtime.module import applied_plan
from fxpar.space import space

Built = tuple[nn.Module, dict[str, torch.Tensor]]
VOCABULARY = 2048


def _ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(0))


def llama(batch: int = 4, length: int = 128, **more: Any) -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=4, use_cache=False, **{**sizes, **more})
    return LlamaForCausalLM(config), {"input_ids": _ids(batch, length), "labels": _ids(batch, length)}


def llama_long() -> Built:
    """Activations outweigh all else."""
    return llama(8, 512)


def llama_recompute() -> Built:
    """The long one, with activation checkpointing."""
    model, inputs = llama(8, 512)
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return model, inputs


def gpt2() -> Built:
    """With its default dropout: attention is not fused on a CPU."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=256, n_layer=4, n_head=8, vocab_size=VOCABULARY, loss_type="ForCausalLM")
    return GPT2LMHeadModel(config), {"input_ids": _ids(4, 128), "labels": _ids(4, 128)}


def bert() -> Built:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 8, "num_hidden_layers": 4}
    mask = torch.ones(4, 128, dtype=torch.long)
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, **sizes)), {
        "input_ids": _ids(4, 128), "attention_mask": mask, "labels": _ids(4, 128)
    }  # fmt: skip


def t5() -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY, d_model=256, d_ff=1024, d_kv=32, num_heads=8, num_layers=3, decoder_start_token_id=0
    )
    return T5ForConditionalGeneration(config), {"input_ids": _ids(4, 96), "labels": _ids(4, 64)}


def vit() -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=256, intermediate_size=1024, num_attention_heads=8, num_hidden_layers=4, image_size=64,
        patch_size=8, num_labels=16, problem_type="single_label_classification",
    )  # fmt: skip
    return ViTForImageClassification(config), {
        "pixel_values": torch.randn(16, 3, 64, 64), "labels": torch.randint(16, (16,))
    }  # fmt: skip


MODELS: dict[str, Callable[[], Built]] = {
    build.__name__: build for build in (llama, llama_long, llama_recompute, gpt2, bert, t5, vit)
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
}


@dataclass(frozen=True)
class Configuration:
    """One row of the table. ``cluster`` is what the plan is made for: other prices, other layouts.

    With ``seed`` nothing is planned: every operation does something drawn at random, which no plan would do.
    """

    model: str
    axes: tuple[tuple[str, int], ...]
    cluster: str = "toy"
    optimizer: str = "adamw"
    seed: int | None = None

    @property
    def size(self) -> int:
        found = 1
        for _, degree in self.axes:
            found *= degree
        return found


CONFIGURATIONS = (
    *(Configuration(model, (("tp", 2),)) for model in MODELS),
    Configuration("llama", (("tp", 4),)),
    Configuration("llama_long", (("tp", 4),)),
    Configuration("gpt2", (("tp", 4),)),
    Configuration("t5", (("tp", 4),)),
    Configuration("llama", (("tp", 2),), cluster="cpu-gloo"),
    Configuration("gpt2", (("tp", 2),), cluster="h100"),
    Configuration("llama_long", (("tp", 4),), cluster="h100"),
    Configuration("llama", (("tp", 2),), optimizer="sgd"),
    *(Configuration(model, (("dp", 2), ("tp", 2))) for model in ("llama", "gpt2", "t5")),
    Configuration("bert", (("outer", 2), ("inner", 2))),
    *(Configuration(model, (("tp", 2),), seed=1) for model in ("llama", "gpt2", "bert", "vit")),
)


def measured(model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], Any], given: list[Any]) -> int:
    """Bytes in use at the peak of ``step`` on this rank: what stands before it, and what it makes.

    ``given`` are the inputs. Gradients must have been freed.
    """
    gc.collect()
    standing = [local(tensor) for tensor in (*model.parameters(), *model.buffers(), *given, *_states(optimizer))]
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in standing}
    with Allocations(standing) as allocations:
        step()
    return sum(sizes.values()) + allocations.peak_bytes


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _states(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def train(model: nn.Module, inputs: dict[str, torch.Tensor], make: Callable[[Any], torch.optim.Optimizer]) -> int:
    """The peak of the third step."""
    optimizer = make(model.parameters())

    def step() -> None:
        out = model(**inputs)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    return measured(model, optimizer, step, list(inputs.values()))


def run(configuration: Configuration) -> tuple[Memory, list[int]]:
    """On a rank: what is predicted, and every rank's measured bytes."""
    torch.manual_seed(0)
    model, inputs = MODELS[configuration.model]()
    mesh = init_device_mesh(
        "cpu",
        tuple(degree for _, degree in configuration.axes),
        mesh_dim_names=tuple(name for name, _ in configuration.axes),
    )
    drawn = None if configuration.seed is None else drawn_plan(model, inputs, configuration)
    fxpar.parallelize(
        model, mesh, example_kwargs=inputs, cluster=configuration.cluster, plan=drawn, optimizer=configuration.optimizer
    )
    predicted = applied_plan(model).memory
    assert predicted is not None
    peak = train(model, inputs, OPTIMIZERS[configuration.optimizer])
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, peak)
    return predicted, peaks


def drawn_plan(model: nn.Module, inputs: dict[str, torch.Tensor], configuration: Configuration) -> Plan:
    """A valid plan of random choices, and what it should need."""
    assert configuration.seed is not None
    program = capture(model, (), inputs).program
    priced = price(space(program, Mesh(configuration.axes)), Cluster.load(configuration.cluster))
    plan = assemble(priced, random_choice(priced.space, configuration.seed))
    return replace(plan, memory=memory(program, plan, configuration.optimizer))


def _on_rank(_rank: int, job: str) -> str:
    data = json.loads(job)
    predicted, peaks = run(Configuration(**{**data, "axes": tuple((name, degree) for name, degree in data["axes"])}))
    return json.dumps({"memory": asdict(predicted), "peaks": peaks})


HEADER = ("model", "mesh", "planned for", "optimizer", "parameters", "gradients", "states", "activations", "transient",
          "predicted peak", "in", "measured peak", "ratio")  # fmt: skip


def row(item: Configuration) -> tuple[str, ...]:
    """One configuration, measured on processes of its own."""
    found = json.loads(run_ranks(_on_rank, item.size, json.dumps(asdict(item))))
    predicted, peak = found["memory"], max(found["peaks"])
    parts = ("parameter", "gradient", "optimizer", "activation", "transient", "peak")
    return (
        item.model, " x ".join(f"{name}={degree}" for name, degree in item.axes),
        item.cluster if item.seed is None else "(drawn)", item.optimizer,
        *(f"{predicted[f'{part}_bytes'] / 1e6:.1f}" for part in parts), predicted["peak_phase"],
        f"{peak / 1e6:.1f}", f"{predicted['peak_bytes'] / peak:.3f}",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare predicted with measured memory.")
    parser.add_argument("--only", default="", help="configurations with this among their values, such as gpt2 or dp")
    args = parser.parse_args()
    print("| " + " | ".join(HEADER) + " |\n" + "| --- " * len(HEADER) + "|", flush=True)
    for item in CONFIGURATIONS:
        if args.only in str(item):
            print("| " + " | ".join(row(item)) + " |", flush=True)


if __name__ == "__main__":
    main()
