"""Train a small Llama from transformers, sharded over all processes.

torchrun --nproc-per-node 2 examples/train_llama.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import fxpar

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))

torch.manual_seed(0)  # the same weights and the same data on every rank
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
)
ids = torch.randint(256, (4, 32))

model = fxpar.parallelize(model, mesh, example_kwargs={"input_ids": ids, "labels": ids}, cluster="toy")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(5):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")

query = model.model.layers[0].self_attn.q_proj.weight
if dist.get_rank() == 0:
    print(f"q_proj.weight: {tuple(query.shape)} as {query.placements}, {tuple(query.to_local().shape)} on this rank")
dist.destroy_process_group()
