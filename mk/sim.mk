.PHONY: reference bench-sim

reference: setup  ## published figures of the field beside ours, with verdicts
	@$(BIN)/pdserve reference

bench-sim: setup  ## simulator speed: an hour of Mooncake's conversation trace on 64 engines, growth from 8 to 512
	@$(BIN)/python -m cluster.sim.bench
