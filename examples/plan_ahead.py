"""Ask what tensor parallelism would do for a model and a machine that are not here.

python examples/plan_ahead.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fxpar

with torch.device("meta"):  # no memory is allocated
    model = LlamaForCausalLM(LlamaConfig(hidden_size=4096, intermediate_size=14336, num_key_value_heads=8))
    ids = torch.empty(1, 4096, dtype=torch.int64)

for degree in (2, 4, 8):
    plan = fxpar.plan(model, {"tp": degree}, example_kwargs={"input_ids": ids, "labels": ids}, cluster="h100")
    sent = sum(item.wire_bytes * item.count for item in plan.collectives)
    print(
        f"tp={degree}: {plan.objective_seconds * 1e3:7.1f} ms a step ({plan.status}), "
        f"{plan.whole_seconds * 1e3:.1f} ms on one device; a rank sends {sent / 1e9:.2f} GB"
    )
print(plan.explain("model.layers.0.mlp"))
