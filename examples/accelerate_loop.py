"""A converted model in a loop of one's own with Accelerate; `accelerate launch` runs it on many devices."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import oelm

torch.manual_seed(0)
# In earnest: AutoModelForCausalLM.from_pretrained("gpt2")
model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=32, n_embd=32, n_layer=2, n_head=4))
rows = torch.arange(64)[:, None] + torch.arange(16)[None, :]  # made data: counting
batches = DataLoader(rows % 50, batch_size=16, shuffle=True)

# Convert before `prepare`: what wraps a model must know what trains. The optimizer may hold every parameter:
# a frozen one has no gradient, and is neither moved nor decayed.
print(oelm.convert(model, "oelm", seed=0))
before = oelm.fingerprint(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
accelerator = Accelerator(cpu=True)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)

for epoch in range(5):
    for batch in batches:
        loss = model(batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}")

accelerator.print(oelm.audit(accelerator.unwrap_model(model), before))
