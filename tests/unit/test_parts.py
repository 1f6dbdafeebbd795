"""How the names of what a plan does are told: by place and axis, with what is alike said once."""

from __future__ import annotations

from fxpar.layout import Mesh
from fxpar.plans import Part, Plan
from fxpar.report import parts_text

MESH = Mesh.of({"dp": 2, "tp": 4})


def told(*parts: Part) -> list[str]:
    plan = Plan(MESH, "toy", "program", {}, (), {}, parts=parts)
    assert Plan.from_json(plan.to_json()) == plan
    assert set(parts_text(plan)) <= set(str(plan).splitlines())
    return parts_text(plan)


def test_styles_stand_by_axis_and_alike_places_together() -> None:
    assert told(
        Part("model.layers.*", 32, "dp", ("FSDP",)),
        Part("model.layers.*", 32, "tp", ("row-parallel", "column-parallel", "sequence-parallel")),
        Part("embed", 1, "dp", ("FSDP",)),
        Part("embed", 1, "tp", ("vocabulary-parallel",)),
        Part("lm_head", 1, "dp", ("FSDP",)),
        Part("lm_head", 1, "tp", ("vocabulary-parallel",)),
    ) == [
        "model.layers.* (x32): dp: FSDP; tp: column- and row-parallel, sequence-parallel",
        "embed, lm_head: dp: FSDP; tp: vocabulary-parallel",
    ]


def test_whole_parameters_on_one_axis_of_the_batch_and_sharded_on_another_are_hsdp() -> None:
    assert told(Part("a", 1, "dp", ("DDP",)), Part("a", 1, "tp", ("FSDP",))) == ["a: dp x tp: HSDP"]
    assert told(Part("a", 1, "dp", ("DDP",)), Part("a", 1, "tp", ("FSDP", "column-parallel"))) == [
        "a: dp: DDP; tp: column-parallel, FSDP"
    ]


def test_what_is_not_split_is_told_too() -> None:
    assert told(Part("", 1, "dp", ()), Part("", 1, "tp", ())) == ["the model: the same on every rank"]


def test_a_glob_never_covers_another_place() -> None:
    ddp = [Part(f"encoder.{number}", 2, "dp", ("DDP",)) for number in range(3)]
    assert told(*ddp) == ["encoder.* (x6): dp: DDP"]
    assert told(*ddp, Part("encoder.3", 1, "dp", ("FSDP",))) == [
        "encoder.0 (x2), encoder.1 (x2), encoder.2 (x2): dp: DDP",
        "encoder.3: dp: FSDP",
    ]
    assert told(Part("head", 1, "dp", ("DDP",)), Part("table", 1, "dp", ("DDP",))) == ["head, table: dp: DDP"]
