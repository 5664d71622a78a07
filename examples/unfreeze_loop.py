"""Layers are unfrozen from the top down in a loop of one's own: one call before every step."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import oelm

torch.manual_seed(0)
# In earnest: AutoModelForCausalLM.from_pretrained("gpt2")
model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=32, n_embd=32, n_layer=3, n_head=4))
rows = (torch.arange(64)[:, None] + torch.arange(16)[None, :]) % 50  # made data: counting

print(oelm.convert(model, "oelm-unfreeze", seed=0))  # q and k train in the last fifth of the steps
before = oelm.fingerprint(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # over all parameters, the frozen ones too
freezing = oelm.Freezing(model, total_steps=30, optimizer=optimizer)

for step in range(30):
    if freezing.before_step(step):  # DDP would have to wrap the model again here
        print(f"step {step}: {freezing.trained_at(step):,} parameters train")
    loss = model(rows, labels=rows).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

print(oelm.audit(model, before))  # raises if a bit moved while it was frozen, or if an unfrozen one did not
