"""Layers are unfrozen from the bottom up in Lightning: pip install lightning."""

import torch
from lightning import LightningModule, Trainer
from torch.utils.data import DataLoader
from transformers import T5Config, T5ForConditionalGeneration

import oelm

# In earnest: AutoModelForSeq2SeqLM.from_pretrained("t5-small")
sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
model = T5ForConditionalGeneration(T5Config(vocab_size=50, decoder_start_token_id=0, **sizes))
rows = torch.randint(5, 50, (64, 8))  # made data: copy the source


class Copying(LightningModule):
    def __init__(self, model: T5ForConditionalGeneration) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)


schedule = {"unfreeze_at": [0.3, 0.6], "order": "bottom-up", "warmup": 0.1}
print(oelm.convert(model, oelm.Method.from_dict({"name": "oelm", "freeze_schedule": schedule}), seed=0))
before = oelm.fingerprint(model)
trainer = Trainer(
    max_epochs=5,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[oelm.Freezing(model).lightning_callback()],
)
trainer.fit(Copying(model.train()), DataLoader(rows, batch_size=16, shuffle=True))
print(oelm.audit(model, before))  # raises if a bit moved while it was frozen, or if an unfrozen one did not
