#!/bin/bash
# Installs a Slurm of one node from Debian's packages and runs scripts of `launch` on it, for real.
# Needs root on a machine that may be spoilt, such as a container; not part of any test suite:
#
#     tests/launch/one_node_slurm.sh [PYTHON]       # of the environment; .venv/bin/python if not given
#
# Ends with status 0 when a job of two ranks has come through the queue, bound as asked for, with the
# environment of the script, and has computed with halos between its ranks; and when a job of which
# one rank fails has been ended. The daemons are stopped at the end; the packages stay.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${1:-$root/.venv/bin/python}
work=$(mktemp -d)
here=$(hostname -s)
cores=$(nproc)
[ "$(id -u)" = 0 ] || { echo "has to be root, to install packages and start daemons" >&2; exit 1; }
[ "$cores" -ge 2 ] || { echo "two ranks need two cores" >&2; exit 1; }

if ! command -v slurmctld slurmd munged sbatch >/dev/null; then
    apt-get update -q
    DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends \
        slurmctld slurmd slurm-client munge
fi

daemons=()
stop() {
    for id in "${daemons[@]}"; do kill "$id" 2>/dev/null || true; done
    wait 2>/dev/null || true
}
trap stop EXIT

[ -e /etc/munge/munge.key ] || dd if=/dev/urandom of=/etc/munge/munge.key bs=1024 count=1 status=none
chown munge: /etc/munge/munge.key
chmod 400 /etc/munge/munge.key
install -d -o munge -m 755 /run/munge
setpriv --reuid=munge --regid=munge --clear-groups /usr/sbin/munged --foreground \
    >"$work/munged.log" 2>&1 &
daemons+=($!)

# Where there is no systemd there are no control groups to confine steps by; binding needs none.
export SLURM_CONF=$work/slurm.conf
cat >"$SLURM_CONF" <<CONF
ClusterName=onenode
SlurmctldHost=$here(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
NodeName=$here NodeAddr=127.0.0.1 CPUs=$cores Sockets=1 CoresPerSocket=$cores ThreadsPerCore=1
PartitionName=all Nodes=$here Default=YES MaxTime=INFINITE State=UP
CONF
mkdir -p "$work/state" "$work/spool"
/usr/sbin/slurmctld -D >"$work/slurmctld.out" 2>&1 &
daemons+=($!)
/usr/sbin/slurmd -D >"$work/slurmd.out" 2>&1 &
daemons+=($!)
for _ in $(seq 60); do
    [ "$(sinfo -h -o %T 2>/dev/null)" = idle ] && break
    sleep 0.5
done
[ "$(sinfo -h -o %T)" = idle ] || { tail "$work"/*.log "$work"/*.out >&2; exit 1; }

cd "$work"
launch() {
    PYTHONPATH=$root "$python" -m distconv launch --scheduler slurm --nodes 1 --ranks-per-node 2 \
        --time 5 --mpi pmi2 --cores-per-rank 1 --setup "export PYTHONPATH=$root" --submit "$@"
}
ended() { # waits for the job of this name
    for _ in $(seq 240); do
        [ -z "$(squeue -h --name="$1")" ] && return
        sleep 0.5
    done
    echo "job $1 does not end" >&2
    exit 1
}

launch -- "$python" "$root/tests/launch/job.py"
ended job
cat job-*.out
grep -q "2 ranks on 2 different cores agree with serial torch" job-*.out

launch --name failing -- "$python" "$root/tests/launch/job.py" --fail
ended failing
grep "rank 1 fails, as asked" failing-*.out
! grep "agree with serial torch" failing-*.out
echo "$(sinfo --version): both jobs ended as they should"
