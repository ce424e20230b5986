"""`python -m distconv launch`: scripts ask for what the job needs, and nonsense is refused."""

from __future__ import annotations

import re
import shlex
import stat
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distconv.__main__ import main
from distconv.planning import Machine
from distconv.tools.commands.launch import SCHEDULERS

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "launch"
PAGE = ROOT / "docs" / "reference" / "machines.md"
JOB = ("--nodes=2", "--ranks-per-node=4", "--time=90")
PROGRAM = ("--", "python", "train.py")

DOCUMENTED = {
    "slurm": {
        "--account --cpu-bind --cpus-per-task --distribution --exclusive --gpu-bind "
        "--gpus-per-node --job-name --kill-on-bad-exit --mpi --nodes --ntasks --ntasks-per-node "
        "--output --partition --qos --threads-per-core --time"
    },
    "lsf": {
        "-J -P -W -X -nnodes -o -q --bind --cpu_per_rs --gpu_per_rs --launch_distribution --nrs "
        "--rs_per_host --smpiargs --tasks_per_rs"
    },
    "flux": {
        "-o --cores-per-task --exclusive --gpus-per-task --job-name --nodes --ntasks --output "
        "--queue --setattr --time-limit"
    },
    "pbs": {"-A -N -j -k -l -n -ppn -q --cpu-bind --depth"},
}
"""Options of sbatch and srun (Slurm 22.05), bsub (LSF 10.1) and jsrun (JSM 10.3), of `flux batch`
and `flux run` (flux-core 0.60), and of qsub (PBS Pro) and the mpiexec of PALS, as their manuals
list them; those of Cray's network are in HPE's notes on Slingshot."""


def script(capsys: pytest.CaptureFixture[str], scheduler: str, *options: str) -> str:
    """Return the script that the command prints."""
    arguments = ["launch", "--dry-run", f"--scheduler={scheduler}", *options]
    if "--" not in options:
        arguments += [*JOB, *PROGRAM]
    assert main(arguments) == 0
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """Return the error with which the command ends."""
    with pytest.raises(SystemExit) as end:
        main(["launch", *options])
    assert end.value.code == 2
    return capsys.readouterr().err


def commands(text: str) -> list[str]:
    """Return the lines that the shell runs, with continued lines joined."""
    joined = text.replace("\\\n", " ")
    return [line for line in joined.splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.*")), ids=lambda path: path.name)
def test_each_example_is_what_its_own_command_line_writes(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = path.read_text()
    (line,) = re.findall(r"^# Written by: python -m distconv launch (.*)$", text, re.M)
    assert main(["launch", "--dry-run", *shlex.split(line)]) == 0
    assert capsys.readouterr().out == text


def test_there_is_an_example_for_every_scheduler() -> None:
    assert {path.suffix for path in EXAMPLES.glob("*.*")} == {f".{s}" for s in SCHEDULERS}


def options_of(scheduler: str, text: str) -> set[str]:
    """Return the options of the scheduler and its launcher in a script, which is shell."""
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    launch = commands(text)[-1].replace("$(( cores * 4 ))", "40").replace('"-gpu"', "gpu")
    prefixes = ("#SBATCH ", "#BSUB ", "# flux: ", "#PBS ")
    directives = " ".join(t.split(p)[1] for t in text.splitlines() for p in prefixes if p in t)
    asked = f"{directives} {launch.removesuffix('python train.py')}"
    return set(re.findall(r"(?<!\S)--?[A-Za-z][\w-]*", asked))


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("gpus", [(), ("--gpus-per-node=4",), ("--gpus-per-node=2",)])
def test_scripts_are_shell_with_documented_options_and_all_ranks(
    scheduler: str, gpus: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--cores-per-rank=10", "--account=bank", "--queue=batch", *gpus)
    text = script(capsys, scheduler, *more)
    (documented,) = DOCUMENTED[scheduler]
    assert options_of(scheduler, text) <= set(documented.split())
    ranks = {"lsf": "--tasks_per_rs 4 ", "pbs": "-n 8 "}.get(scheduler, "--ntasks=8 ")
    nodes = {"lsf": "--nrs 2 ", "pbs": "-ppn 4 "}.get(scheduler, "--nodes=2 ")
    assert ranks in commands(text)[-1] and nodes in commands(text)[-1]
    assert "export OMP_NUM_THREADS=$cores" in commands(text) and "cores=10" in commands(text)


def test_time_is_written_as_each_scheduler_reads_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert "#SBATCH --time=01:30:00\n" in script(capsys, "slurm")
    assert "#BSUB -W 01:30\n" in script(capsys, "lsf", "--cores-per-rank=1")
    assert "# flux: --time-limit=90m\n" in script(capsys, "flux")
    assert "#PBS -l walltime=01:30:00\n" in script(capsys, "pbs")
    clock = ("--nodes=2", "--ranks-per-node=4", "--time=26:30:01", *PROGRAM)
    assert "#SBATCH --time=26:31:00\n" in script(capsys, "slurm", *clock)
    assert "write minutes, or HH:MM:SS" in refusal(capsys, *clock[:2], "--time=soon", *PROGRAM)


SAYS = {
    "el-capitan": [
        *("# flux: --setattr=rdzv_get_en=0", "flux run --nodes=16 --ntasks=64", "cores=21"),
        *("-o fastload=on", "--gpus-per-task=1", "FI_CXI_RDZV_PROTO=alt_read"),
        'MIOPEN_USER_DB_PATH="${TMPDIR:-/tmp}/miopen-$USER"',
    ],
    "frontier": [
        *("#SBATCH --gpus-per-node=8", "--ntasks=128", "cores=7", "--gpu-bind=none"),
        *("ROCR_VISIBLE_DEVICES=4,5,2,3,6,7,0,1", "#SBATCH --network=disable_rdzv_get"),
    ],
    "aurora": [
        *("#PBS -l select=16", "mpiexec -n 192 -ppn 12", "--cpu-bind list:1-8:9-16:"),
        *(
            "#PBS -l filesystems=home:flare",
            'CCL_CONFIGURATION_PATH=""',
            "DISTCONV_TRANSPORT=torch",
        ),
    ],
    "jupiter": ["#SBATCH --partition=booster", "--ntasks=64", "cores=72"],
    "alps": ['NCCL_NET="AWS Libfabric"', "MPICH_GPU_SUPPORT_ENABLED=0", 'NCCL_PROTO="^LL128"'],
    "perlmutter": ["#SBATCH --constraint=gpu", "FI_MR_CACHE_MONITOR=userfaultfd", "cores=16"],
}
"""Words of the script of each machine."""


def machine_command(name: str) -> list[str]:
    """Return the command line of `launch` for a machine, as the page has it."""
    text = PAGE.read_text().replace("\\\n", " ")
    found = [line for line in text.splitlines() if f"--machine {name} " in line]
    (line,) = found
    return shlex.split(line)[3:]


@pytest.mark.parametrize("name", SAYS)
def test_scripts_for_machines_are_bound_and_have_their_variables(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(machine_command(name)) == 0
    text = capsys.readouterr().out
    machine = Machine.load(name)
    assert machine.launch is not None
    assert machine.sources["launch"]
    assert machine.sources.get("environment") or not machine.environment
    assert [word for word in SAYS[name] if word not in text] == []
    assert "02:00:00" in text or "--time-limit=120m" in text
    (documented,) = DOCUMENTED[machine.launch.scheduler]
    more = {"--network", "--constraint", "--uenv", "--view"}
    assert options_of(machine.launch.scheduler, text) <= set(documented.split()) | more
    shown = subprocess.run(
        ["bash", "-uc", "\n".join([*exports(text), "env"])],
        env={"USER": "me", "PATH": "/usr/bin:/bin", "cores": "1"},
        capture_output=True,
        text=True,
    )
    got = dict(line.split("=", 1) for line in shown.stdout.splitlines() if "=" in line)
    for variable, value in machine.environment.items():
        wanted = value.replace("${TMPDIR:-/tmp}", "/tmp").replace("$USER", "me")
        assert got[variable] == wanted


def exports(text: str) -> list[str]:
    return [line for line in commands(text) if line.startswith("export ")]


HOSTILE = """a"; touch x; $(touch x) `touch x` ${A:-$(touch x)} \\" $1 ' !! & é"""


def test_no_value_of_a_machine_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    machine = Machine.load("perlmutter")
    machine.environment = {"A": HOSTILE, "B": "$HOME/${C:-/tmp}/${D}"}
    machine.save(tmp_path / "machine.json")
    assert main(["launch", "--dry-run", f"--machine={tmp_path}/machine.json", *JOB, *PROGRAM]) == 0
    lines = [*exports(capsys.readouterr().out)[-2:], 'printf "%s\\0" "$A" "$B"']
    shown = subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        env={"HOME": "/home/me", "D": "d", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert (shown.stdout, shown.stderr) == (f"{HOSTILE}\0/home/me//tmp/d\0", "")
    assert [path.name for path in tmp_path.iterdir()] == ["machine.json"]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            {"environment": {"A=1; touch x; B": "1"}},
            "'A=1; touch x; B' is not a valid name of a variable",
        ),
        ({"environment": {"A": "1\ntouch x"}}, "has more than one line"),
        ({"options": ("--exclusive\ntouch x",)}, "has more than one line"),
    ],
)
def test_a_machine_cannot_add_lines_to_a_script(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, entries: dict[str, Any], message: str
) -> None:
    machine = Machine.load("perlmutter")
    assert machine.launch is not None
    machine.environment = entries.get("environment", {})
    machine.launch = replace(machine.launch, options=entries.get("options", ()))
    machine.save(tmp_path / "machine.json")
    of = f"--machine={tmp_path}/machine.json"
    assert message in refusal(capsys, "--dry-run", of, *JOB, *PROGRAM)


def test_a_path_with_a_line_break_does_not_leave_its_comment(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "a\ntouch x #.json"
    Machine.load("perlmutter").save(path)
    said = refusal(capsys, "--dry-run", f"--machine={path}", *JOB, *PROGRAM)
    assert "has more than one line" in said


def test_options_go_before_those_of_a_machine(capsys: pytest.CaptureFixture[str]) -> None:
    of = "--machine=perlmutter"
    one = ("--nodes=1", "--time=5", "--ranks-per-node=2", "--gpus-per-node=2", *PROGRAM)
    assert main(["launch", "--dry-run", of, *one]) == 0
    text = capsys.readouterr().out
    assert "--ntasks=2 " in text and "--gpus-per-node=2 " in text and "lscpu" in text
    assert main(["launch", "--dry-run", of, "--scheduler=flux", *one]) == 0
    other = capsys.readouterr().out
    assert "flux run" in other and "constraint" not in other


def test_what_no_machine_says_has_to_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--scheduler is missing" in refusal(capsys, "--nodes=1", "--time=5", *PROGRAM)
    rest = ("--nodes=1", "--time=5", *PROGRAM)
    assert "--ranks-per-node is missing" in refusal(capsys, "--scheduler=slurm", *rest)
    lassen = "--machine=lassen"
    assert "does not describe how jobs start" in refusal(capsys, lassen, *rest)


def test_machines_are_found_by_name_outside_of_a_clone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["launch", "--dry-run", "--machine=frontier", "--nodes=1", "--time=5", *PROGRAM]
    assert main(given) == 0
    assert "ROCR_VISIBLE_DEVICES" in capsys.readouterr().out
    assert "or name one of alps, aurora" in refusal(capsys, "--machine=none", *given[3:])
    machine = Machine.load("perlmutter")
    machine.save(tmp_path / "frontier")  # a file goes before a name
    assert main(given) == 0
    assert "ROCR_VISIBLE_DEVICES" not in capsys.readouterr().out


def test_ranks_that_share_gpus_are_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["launch", "--dry-run", "--scheduler=slurm", "--gpus-per-node=2", *JOB, *PROGRAM]) == 0
    )
    assert "4 ranks on a node share 2 GPUs" in capsys.readouterr().err
    assert (
        main(["launch", "--dry-run", "--scheduler=slurm", "--gpus-per-node=4", *JOB, *PROGRAM]) == 0
    )
    assert not capsys.readouterr().err


@pytest.mark.parametrize("stops", [True, False])
def test_a_job_of_lsf_ends_with_the_status_that_queues_it_again(
    stops: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = script(capsys, "lsf", "--requeue", "--warn=10", "--cores-per-rank=1")
    assert "#BSUB -Q 99\n" in text and "#BSUB -o /dev/null\n" in text
    touch = 'touch "$DISTCONV_CONTINUE"' if stops else "true"
    (tmp_path / "jsrun").write_text(f"#!/bin/sh\necho here; {touch}\n")
    (tmp_path / "jsrun").chmod(stat.S_IRWXU)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "LSB_JOBID": "7"}
    for _ in range(2):
        ended = subprocess.run(["bash"], input=text, text=True, cwd=tmp_path, env=environment)
        assert ended.returncode == (99 if stops else 0)
    assert (tmp_path / "train-7.out").read_text() == "here\nhere\n"  # of both runs


@pytest.mark.parametrize("stops", [True, False])
def test_a_job_is_queued_again_where_its_program_has_stopped(
    stops: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = script(capsys, "slurm", "--requeue", "--warn=10", "--cores-per-rank=1")
    assert "#SBATCH --signal=USR1@600\n" in text and "#SBATCH --requeue\n" in text
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    touch = 'touch "$DISTCONV_CONTINUE"' if stops else "true"
    for name, line in (("srun", touch), ("scontrol", 'echo "$@" > asked')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(stat.S_IRWXU)
    (tmp_path / "train-7.continue").touch()  # of the job before it was queued again
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    assert not subprocess.run(
        ["bash"], input=text, text=True, cwd=tmp_path, env=environment
    ).returncode
    asked = tmp_path / "asked"
    assert (asked.read_text() == "requeue 7\n") if stops else not asked.exists()


@pytest.mark.parametrize(
    ("scheduler", "says", "after"),
    [
        ("slurm", "Submitted batch job 41", "--dependency=afterany:41"),
        ("lsf", "Job <41> is submitted to queue <batch>.", "-w ended(41)"),
        ("flux", "f41xY", "batch --dependency=afterany:f41xY"),
        ("pbs", "41.server", "-W depend=afterany:41.server"),
    ],
)
def test_a_chain_of_jobs_waits_each_for_the_one_before(
    scheduler: str,
    says: str,
    after: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    submit = tmp_path / SCHEDULERS[scheduler][0]
    submit.write_text(f"#!/bin/sh\ncat > /dev/null\necho \"$@\" >> calls\necho '{says}'\n")
    submit.chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    given = ["--chain=3", "--submit", "--cores-per-rank=1"]
    assert main(["launch", f"--scheduler={scheduler}", *JOB, *given, *PROGRAM]) == 0
    first = "batch" if scheduler == "flux" else ""
    assert (tmp_path / "calls").read_text().splitlines() == [first, after, after]
    assert capsys.readouterr().out.count(says) == 3


def test_the_environment_follows_the_devices(capsys: pytest.CaptureFixture[str]) -> None:
    on_cpus = script(capsys, "slurm")
    assert "DISTCONV_TRANSPORT=mpi" in on_cpus and "MALLOC_TRIM_THRESHOLD_=" in on_cpus
    assert "GLIBC_TUNABLES=glibc.malloc.hugetlb=1" in on_cpus
    own = script(capsys, "slurm", "--gpus-per-node=4")
    assert "DISTCONV_TRANSPORT=torch" in own and "malloc" not in own.lower()
    shared = script(capsys, "slurm", "--gpus-per-node=2")
    assert "DISTCONV_TRANSPORT=mpi" in shared


def test_a_command_keeps_its_arguments_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    program = ["python", "-m", "my.job", "--title", "a b; rm *", "--", "-x"]
    text = script(capsys, "slurm", *JOB, "--", *program)
    assert shlex.split(commands(text)[-1])[-len(program) :] == program
    assert "#SBATCH --job-name=my.job\n" in text


def test_a_slurm_job_whose_ranks_were_killed_ends_with_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = script(capsys, "slurm", *JOB, "--cores-per-rank=1", *PROGRAM)
    killed = "srun() { return 137; }\n" + text
    assert subprocess.run(["bash"], input=killed, text=True, check=False).returncode == 1


def test_the_number_of_cores_is_counted_where_it_is_not_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = commands(script(capsys, "slurm", "--nodes=1", "--ranks-per-node=1", *JOB[2:], *PROGRAM))
    count = [line for line in lines if "cores" in line][:2]
    end = subprocess.run(
        ["bash", "-ec", "\n".join([*count, "echo $cores"])], capture_output=True, text=True
    )
    assert end.returncode == 0 and int(end.stdout) >= 1, end.stderr


@pytest.mark.parametrize(
    "options, said",
    [
        (("--nodes=0",), "0 nodes is not a valid number"),
        (("--ranks-per-node=-1",), "-1 ranks per node"),
        (("--time=0",), "0 minutes"),
        (("--cores-per-rank=0",), "0 cores per rank"),
        (("--gpus-per-node=8",), "4 ranks a node use 4 of its 8 GPUs"),
        (("--gpus-per-node=3",), "cannot share 3 GPUs evenly"),
        (("--gpus-per-node=-1",), "-1 GPUs"),
        (("--transport=nccl",), "NCCL, which needs a GPU for each rank"),
        (("--transport=torch", "--gpus-per-node=2"), "between GPUs"),
        (("--name=two words",), "is not one word"),
        (("--setup=a\nb",), "more than one line"),
        (("--scheduler=lsf",), "pass --cores-per-rank"),
        (("--scheduler=lsf", "--cores-per-rank=1", "--mpi=pmi2"), "option of Slurm"),
        (("--scheduler=flux", "--mpi=pmi2"), "option of Slurm"),
        (("--submit", "--dry-run"), "--dry-run submits nothing"),
        (("--warn=90",), "--warn 90 minutes before the end of a job of 90; choose from 1 to 89"),
        (("--chain=0",), "--chain 0: choose 1 or more jobs"),
        (("--chain=2", "--requeue"), "--chain 2 and --requeue: choose"),
        (("--scheduler=pbs", "--warn=5"), "pbs sends no signal before the end"),
        (("--scheduler=flux", "--requeue"), "submit a chain of jobs, as by --chain 4"),
        (("--scheduler=pbs", "--requeue"), "a job of pbs cannot queue itself again"),
    ],
)
def test_nonsense_is_refused(
    options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(capsys, "--scheduler=slurm", *JOB, *options, *PROGRAM)


@pytest.mark.parametrize("program", [(), ("--",), ("--", "mpiexec", "-n", "4", "python", "x.py")])
def test_a_command_that_is_none_or_starts_ranks_itself_is_refused(
    program: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "python train.py" in refusal(capsys, "--scheduler=slurm", *JOB, *program)


def test_a_script_is_written_replaced_and_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    submit = tmp_path / "sbatch"
    submit.write_text("#!/bin/sh\ncat > taken\nexit 3\n")
    submit.chmod(submit.stat().st_mode | stat.S_IXUSR)
    arguments = ["launch", "--scheduler=slurm", *JOB]
    assert main([*arguments, *PROGRAM]) == 0
    written = (tmp_path / "train.slurm").read_text()
    assert "8 ranks on 2 nodes" in capsys.readouterr().out
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert "there is no sbatch here" in refusal(capsys, *arguments[1:], "--submit", *PROGRAM)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert main([*arguments, "--submit", *PROGRAM]) == 3
    assert (tmp_path / "taken").read_text() == written
    (tmp_path / "train.slurm").write_text("mine")
    assert "was not written by this command" in refusal(capsys, *arguments[1:], *PROGRAM)
    assert (tmp_path / "train.slurm").read_text() == "mine"
