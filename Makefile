# Two commands do everything on a fresh machine with Python: `make demo` and `make test`.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
RANKS  := 8 6 4 3 2
# More ranks than cores have to yield to each other; each computes on one thread.
RUN    := MPIR_CVAR_POLLS_BEFORE_YIELD=1 OMP_NUM_THREADS=1
# Memory that is freed stays with the process, in huge pages; glibc would fetch activations anew in
# every step.
KEEP   := MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=17179869184 \
          MALLOC_TOP_PAD_=134217728 GLIBC_TUNABLES=glibc.malloc.hugetlb=1
# Processes of tests look for garbage less often.
TEST   := PYTHONPATH='$(CURDIR)/tests/support/startup'
# With many processes on two cores, those that wait in MPI sleep in between: as Linux shares cores out,
# one that only yields has as much of them as one that computes. They look for messages ten times
# before they sleep, which takes 4 ranks 6% less time than once. Tests on 2 and 3 ranks take 1.3 to 1.9
# times as long so, and go without; RESTING is for loops over numbers of ranks, n.
REST   := MPIR_CVAR_ENABLE_HEAVY_YIELD=1 MPIR_CVAR_POLLS_BEFORE_YIELD=10
RESTING := $$([ $$n -lt 4 ] || echo $(REST))
LIMIT  := timeout -k 10
# Every rank of every job would compile the sources anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-cosmoflow demo-unet3d demo-vae demo-fractals study check docs test no-mpi wheel-check reports nightly bench compare gpu coverage study-methods networks lint clean

$(VENV)/ready: setup.cfg setup.py constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[mpich,test,data,dev]'
	touch $@

demo: $(VENV)/ready
	$(RUN) $(KEEP) $(BIN)/python -m examples.mesh_tangling.demo

demo-cosmoflow: $(VENV)/ready
	$(RUN) $(KEEP) $(BIN)/python -m examples.cosmoflow.demo

demo-unet3d: $(VENV)/ready
	$(RUN) $(KEEP) $(BIN)/python -m examples.unet3d.demo

demo-fractals: $(VENV)/ready
	$(RUN) $(KEEP) $(BIN)/python -m examples.fractals.demo

# The autoencoders of diffusers with random weights, in under 20 minutes.
demo-vae: $(VENV)/ready
	$(BIN)/pip install -q -c constraints.txt -e '.[mpich,vae]'
	$(RUN) $(KEEP) KINETO_LOG_LEVEL=99 $(BIN)/python -m examples.vae.demo

# The error of CosmoFlow against the size of a sample, in under 20 minutes on two cores; stopped at any
# moment, it goes on where it was.
study: $(VENV)/ready
	$(RUN) $(KEEP) $(BIN)/python -m examples.cosmoflow.study

# Before a pull request, in under two minutes on two cores: style and types, then what finds most for
# its time. On one rank that is index arithmetic and the floors; on two, a sample of every function
# against serial torch, and a file or two of each folder.
QUICK := $(addprefix tests/,ops/test_coverage.py ops/test_custom_function.py \
         ops/conv/test_overlapped_convolution.py ops/support/test_windowed_properties.py \
         ops/norm/test_properties.py ops/reduce/test_properties.py tensor/test_dist_tensor.py \
         model/test_buckets.py model/test_parallelize.py comm/test_movements.py \
         transport/test_staged.py grid/test_journal.py)
check: lint
	@status=0; \
	echo "== 2 ranks"; \
	$(RUN) $(TEST) $(LIMIT) 600 $(BIN)/mpiexec -n 2 $(BIN)/python -m pytest -q --capture=sys -m "parallel[match]" $(QUICK) || status=1; \
	echo "== 1 rank"; \
	$(RUN) $(TEST) $(LIMIT) 600 $(BIN)/python -m pytest -q --capture=sys tests/geometry tests/test_floors.py || status=1; \
	exit $$status

# The site, into build/docs/index.html, after its tutorials have been run: they have to print what the
# pages say.
docs: $(VENV)/ready
	$(BIN)/pip install -q -c constraints.txt -e '.[docs]'
	$(RUN) $(TEST) $(REST) $(LIMIT) 300 $(BIN)/mpiexec -n 2 $(BIN)/python -m pytest -q --capture=sys -m "parallel[match]" tests/test_docs.py -k tutorials
	$(BIN)/python -m sphinx -W --keep-going -q -j auto -b html -d build/doctrees docs build/docs

# One launch for each number of ranks. Files with tests of a single rank run four at a time, the
# slowest first: some of them wait for jobs of their own.
test: $(VENV)/ready
	@status=0; \
	for n in $(RANKS); do \
	  echo "== $$n ranks"; \
	  env $(RUN) $(TEST) $(RESTING) $(LIMIT) 1500 $(BIN)/mpiexec -n $$n $(BIN)/python -m pytest -q --capture=sys -m "parallel[match]" || status=1; \
	done; \
	echo "== 1 rank"; \
	$(RUN) $(TEST) $(REST) $(LIMIT) 1500 $(BIN)/python -m pytest -q --capture=sys -n 4 --dist loadfile --no-loadscope-reorder -m "parallel[match]" || status=1; \
	exit $$status

# In a fresh environment without mpi4py, and then without the library of any MPI; about two minutes.
no-mpi:
	$(PYTHON) -m tests.support.without_mpi

# Source distribution and wheel, into dist/, and the quick start of README with the wheel alone.
wheel-check: $(VENV)/ready
	$(BIN)/pip install -q -c constraints.txt -e '.[release]'
	$(BIN)/python -m tests.support.wheel_check

# A report of each command, looked at in a headless Chromium, with pictures in build/reports.
reports: $(VENV)/ready
	$(BIN)/python -m tests.support.browser

# Which torch functions are supported, as docs/reference/coverage.md has it.
coverage: $(VENV)/ready
	$(RUN) $(BIN)/mpiexec -n 2 $(BIN)/python -m tests.support.supported

# The properties with 50 times as many examples, others each time, and the same on all ranks. Where
# every rank waits in MPI, a thread ends the run. SEED repeats an earlier run. Before them, long runs
# that look for leaks, and runs of which a rank is killed at a random moment.
SEED ?= $(shell date +%s)
nightly: SEED := $(SEED)
nightly: $(VENV)/ready
	@status=0; echo "SEED=$(SEED)"; \
	$(RUN) $(REST) $(LIMIT) 3600 $(BIN)/mpiexec -n 4 $(BIN)/python -m tests.support.soak || status=1; \
	$(LIMIT) 3600 $(BIN)/python -m tests.support.killed_workers 20 $(SEED) || status=1; \
	for n in $(RANKS) 1; do \
	  echo "== $$n ranks"; \
	  env $(RUN) $(RESTING) $(LIMIT) 14400 $(BIN)/mpiexec -n $$n $(BIN)/python -m pytest -q \
	    -m "(hypothesis or nightly) and parallel[match]" --hypothesis-profile=nightly --hypothesis-seed=$(SEED) \
	    --timeout 3600 --timeout-method=thread || status=1; \
	done; \
	exit $$status

# Every benchmark beside its bound, into benchmarks/results. Nothing else should run meanwhile. To cut
# weights in channels and in filters takes four ranks.
RECORD := $(RUN) $(KEEP) KINETO_LOG_LEVEL=99 $(LIMIT) 3600 $(BIN)/mpiexec
bench: $(VENV)/ready
	$(RECORD) -n 2 $(BIN)/python -m benchmarks.record benchmarks/results/cpu.md
	$(RECORD) -n 4 $(BIN)/python -m benchmarks.record benchmarks/results/channels.md channels
	$(RECORD) -n 2 $(BIN)/python -m benchmarks.sweep benchmarks/results/sweep.md

# How much longer a step takes than in another commit, in launches of both that take turns, in about
# eight minutes: `make compare OLD=main`. Nothing else should run meanwhile.
OLD ?= HEAD
compare: $(VENV)/ready
	$(RUN) $(KEEP) $(BIN)/python -m benchmarks.commits $(OLD)

# On a machine with a GPU that torch finds, of any vendor, in its own Python, with nothing from the
# network. Ranks share GPUs where there are fewer; GPU_NCCL is the path of an NCCL from 2.30 on, which
# lets them, in place of torch's own. The first lines say what cannot be done there. Tests marked `gpu`
# run, in 400 seconds at most, then the benchmarks, in 330. All output is in build/gpu.
GPU_PYTHON ?= python3
gpu:
	@$(GPU_PYTHON) -m benchmarks.gpu.needs
	$(GPU_PYTHON) -m pip install -q --no-index --no-deps --no-build-isolation -e .
	@status=0; \
	$(GPU_PYTHON) -m tests.gpu tests 400 || status=1; \
	$(GPU_PYTHON) -m tests.gpu bench 330 || status=1; \
	exit $$status

# Methods of learning together at equal numbers of samples, into docs/reference/training_methods.png. What has
# been run before is left as it is (runs/methods).
study-methods: $(VENV)/ready
	$(BIN)/python -m examples.mesh_tangling.compare_methods

# Networks, losses and metrics of other packages against their serial runs, into docs/reference/networks.md; in
# under 40 minutes on two cores. The packages lie in a folder of their own, without what they depend
# on, so that nothing replaces torch.
NETWORKS := .networks
$(NETWORKS)/ready: tests/networks/requirements.txt $(VENV)/ready
	rm -rf $(NETWORKS)
	$(BIN)/pip install -q --no-deps --target $(NETWORKS) -r $<
	touch $@
networks: $(NETWORKS)/ready
	PYTHONPATH=$(CURDIR)/$(NETWORKS) $(BIN)/python -m tests.networks

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(NETWORKS) build dist *.egg-info runs data
