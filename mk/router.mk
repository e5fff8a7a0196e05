.PHONY: bench-router

bench-router: setup  ## one routing decision: 64 workers, prompts of 8,192 tokens; memory and growth of the index
	@$(BIN)/python -m router.bench
