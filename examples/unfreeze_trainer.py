"""Q and K train first and are frozen later, in Hugging Face's Trainer; a run that resumes goes on exactly."""

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import oelm

# In earnest: AutoModelForSequenceClassification.from_pretrained("bert-base-uncased", num_labels=2)
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
model = BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=2, **sizes))

# Made data: the first token decides the label.
texts = torch.randint(5, 50, (64, 12))
rows = [{"input_ids": text, "labels": int(text[0] > 27)} for text in texts]

print(oelm.convert(model, "train-then-freeze", seed=0))
before = oelm.fingerprint(model)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, max_steps=20, learning_rate=1e-3, use_cpu=True, report_to=[], disable_tqdm=True
    )
    callback = oelm.Freezing(model).trainer_callback()
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[callback])
    trainer.train()
    print(oelm.audit(model, before))  # raises if a bit moved since step 4, when q and k were frozen
    trainer.save_model(folder)  # an ordinary BERT checkpoint
    model = oelm.load(folder)  # frozen as it was
