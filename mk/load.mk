.PHONY: bench bench-client

bench: setup  ## our layer's cost: colocated, direct two-call split, pdserve; concurrency 1, 8, 32 (6 minutes)
	@$(BIN)/python -m loadtests.bench.fronts --out out/bench/fronts

bench-client: setup  ## CPU per token of our streaming clients beside httpx and aiohttp (half a minute)
	@$(BIN)/python -m loadtests.bench.clients

.PHONY: footprint
footprint: setup  ## resident memory and start time of every process of a 1P1D cluster
	@$(BIN)/python -m loadtests.bench.footprint
