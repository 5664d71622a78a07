#!/usr/bin/env bash
# IMDB, Medium-512 classifier: baseline and oelm at lr 3e-4 with warm-up and cosine, epoch chosen on validation.
# Usage: results/imdb_medium_512.sh DATA OUT   (DATA from `oelm data prepare imdb --tokenizer gpt2 --out DATA`)
# Four runs at a time share the GPU, so their times are no measurement of speed.
set -u
data=$1 out=$2
mkdir -p "$out"
run() {
  method=$1 dropout=$2 seed=$3
  python3 -m oelm train --data "$data" --model gpt-medium-512 --method "$method" --lr 3e-4 --epochs 3 \
    --batch-size 16 --seed "$seed" --set training.warmup=500 --set training.save_every=0 \
    --set model.dropout="$dropout" --set model.attention_dropout="$dropout" \
    --out "$out/$method-dropout$dropout-s$seed" --overwrite > "$out/$method-dropout$dropout-s$seed.log" 2>&1
}
for dropout in 0.0 0.1; do
  for seed in 1 2 3; do
    for method in baseline oelm; do
      run "$method" "$dropout" "$seed" &
      while [ "$(jobs -rp | wc -l)" -ge "${JOBS:-4}" ]; do wait -n; done
    done
  done
done
wait
tail -qn 12 "$out"/*.log | grep -E "test accuracy|Error|oelm:"
