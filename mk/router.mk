.PHONY: bench-router

bench-router: setup  ## one routing decision: 64 workers, prompts of 8,192 tokens; memory and growth of the index
	@$(BIN)/python -m router.bench

.PHONY: router-report
router-report: setup  ## a recorded trace against simulated engines, once per routing policy (TRACE=file for another one)
	@$(BIN)/python -m loadtests.router_report $(if $(TRACE),--trace $(TRACE)) $(ARGS)
