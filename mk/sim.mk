.PHONY: reference bench-sim

reference: setup  ## published figures of the field beside ours, with verdicts
	@$(BIN)/pdserve reference

bench-sim: setup  ## simulator speed: an hour of Mooncake's conversation trace on 64 engines, growth from 8 to 512
	@$(BIN)/python -m cluster.sim.bench

.PHONY: fidelity
fidelity: setup  ## the simulator's error against live clusters, simulated engines and vLLM on CPU; about 35 minutes, once
	@$(BIN)/python -m loadtests.fidelity $(FIDELITY_ARGS)
