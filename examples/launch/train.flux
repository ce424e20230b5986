#!/bin/bash
# flux: --job-name=examples.mesh_tangling.train
# flux: --nodes=16
# flux: --exclusive
# flux: --time-limit=120m
# flux: --output=examples.mesh_tangling.train-{{id}}.out
# flux: --setattr=system.bank=science
# flux: --queue=pbatch

# Written by: python -m distconv launch --scheduler=flux --nodes=16 --ranks-per-node=4 --time=120 --gpus-per-node=4 --account=science --queue=pbatch '--setup=source .venv/bin/activate' -- python -m examples.mesh_tangling.train --data train.h5 --validation val.h5 --grid sample=16,height=2,width=2 --output run
set -e
source .venv/bin/activate

# The cores of a node in equal parts, hardware threads not counted.
cores=$(( $(lscpu --parse=CORE,SOCKET | grep -v '^#' | sort -u | wc -l) / 4 ))
[ "$cores" -ge 1 ] || { echo "a node has fewer cores than its 4 ranks" >&2; exit 1; }
export OMP_NUM_THREADS=$cores
export DISTCONV_TRANSPORT=torch

# Ranks are numbered node by node, so that those of a sample are neighbours.
# Every rank sees the GPUs of its node and takes its own.
flux run --nodes=16 --ntasks=64 --cores-per-task=$cores \
    -o cpu-affinity=per-task -o exit-on-error \
    --gpus-per-task=1 -o gpu-affinity=on \
    python -m examples.mesh_tangling.train --data train.h5 --validation val.h5 --grid sample=16,height=2,width=2 --output run
