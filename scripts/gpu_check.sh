#!/usr/bin/env bash
# What one GPU does with Stable Diffusion 1.5's architecture, random weights, in at most nine minutes, offline:
#
#     scripts/gpu_check.sh [OUT.json]            default gpu_check.json
#     scripts/gpu_check.sh --dry [OUT.json]      the same steps with the embedded model on any machine, in half a minute
#
# Each part is a run of scripts/benchmark.py, in a process of its own and under a time limit; the most important come
# first. OUT.json is written anew after each part, whatever became of it.
set -u
dry=0
if [ "${1:-}" = --dry ]; then dry=1; shift; fi
out=${1:-gpu_check.json}
case "$out" in -*) echo "error: unknown option $out; usage: gpu_check.sh [--dry] [OUT.json]" >&2; exit 1 ;; esac
[ -d "$(dirname "$out")" ] || { echo "error: there is no folder $(dirname "$out")" >&2; exit 1; }
root=$(cd "$(dirname "$0")/.." && pwd)
parts=$(mktemp -d)
trap 'rm -rf "$parts"' EXIT
end=$((SECONDS + ${GPU_CHECK_SECONDS:-525}))

# Seconds at most, name, options
if [ $dry = 1 ]; then
    common=(--config "$root/config/tiny.py" --reps 1 --config.sample.num_steps=2 --config.cpu_threads=1)
    one=(--config.sample.batch_size=2 --config.train.batch_size=1)
    plan="120 float32_batch1 --config.mixed_precision=no
120 bf16_batch1 --config.mixed_precision=bf16
1 bf16_batch1_compiled --config.mixed_precision=bf16 --config.compile=True"
else
    common=(--config "$root/config/base.py" --random_weights sd15 --reps 5)
    one=()
    eight="--config.sample.batch_size=8 --config.train.batch_size=8"
    plan="120 fp16_batch1 --config.mixed_precision=fp16
120 fp16_batch8 --config.mixed_precision=fp16 $eight
120 bf16_batch8 --config.mixed_precision=bf16 $eight
90 fp16_batch1_checkpointing --config.mixed_precision=fp16 --config.train.gradient_checkpointing=True
90 bf16_batch1 --config.mixed_precision=bf16
200 fp16_batch8_compiled --config.mixed_precision=fp16 --config.compile=True $eight
200 bf16_batch8_compiled --config.mixed_precision=bf16 --config.compile=True $eight"
fi

collect() { # all parts so far, into OUT.json; the table too if asked
    python - "$parts" "$out" "${1:-}" <<'PYTHON'
import json, os, pathlib, sys
folder, out, shows = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
parts = {}
for line in (folder / "done").read_text().splitlines():
    name, code, seconds = line.split()
    file, said = folder / f"{name}.json", (folder / f"{name}.log").read_text().strip().splitlines()
    parts[name] = json.loads(file.read_text()) if code == "0" else {"failed": said[-1] if said else ""}
    if code in ("124", "137"):
        parts[name]["failed"] = "it ran out of time"
    parts[name]["wall_s"] = int(seconds)
new = out.with_name(out.name + ".new")
new.write_text(json.dumps({"parts": parts}, indent=2))
os.replace(new, out)
if shows:
    titles = ("peak GB", "sampled/s", "trained/s", "images/s", "step peak%", "train peak%", "logp_gap")
    print(f"{'part':<26}" + "".join(f"{title:>12}" for title in titles))
    for name, part in parts.items():
        if "failed" in part:
            print(f"{name:<26}  failed: {part['failed'][:80]}")
            continue
        phases, rates = part["phases"], part["derived"]
        cells = [max(phase["peak_gb"] for phase in phases.values())]
        cells += [rates[f"{key}images_per_s"] for key in ("sampling_", "training_", "")]
        cells += [100 * phases["step"]["peak_share"], 100 * phases["train"]["peak_share"], part["logp_gap"]]
        print(f"{name:<26}" + "".join(f"{cell:>12.3g}" for cell in cells))
PYTHON
}

: >"$parts/done"
while read -r limit name options; do
    left=$((end - SECONDS))
    if [ $left -lt $((limit < 20 ? limit : 20)) ]; then
        echo "no time left for $name" | tee "$parts/$name.log"
        echo "$name 124 0" >>"$parts/done"
        continue
    fi
    started=$SECONDS
    # shellcheck disable=SC2086  # options are words without spaces
    timeout -k 5 $((limit < left ? limit : left)) python "$root/scripts/benchmark.py" "${common[@]}" \
        ${one[@]+"${one[@]}"} $options --phases sample,decode,reward,train --json "$parts/$name.json" \
        >"$parts/$name.log" 2>&1 </dev/null
    code=$?
    echo "$name $code $((SECONDS - started))" >>"$parts/done"
    echo "$name: exit code $code after $((SECONDS - started)) s"
    collect
done <<<"$plan"
collect table
echo "written: $out"
[ -n "$(grep ' 0 ' "$parts/done")" ] # at least one part
