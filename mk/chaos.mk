.PHONY: chaos chaos-memory chaos-simulated chaos-vllm drain

chaos: setup  ## kill and stop workers and routers under load, every token checked; about 20 minutes
	@$(BIN)/python -m tests.chaos

chaos-memory: setup  ## 300 faults in virtual time: dispatcher and lifecycle over pools in memory, under a minute
	@$(BIN)/python -m tests.chaos --only memory

chaos-simulated: setup  ## 200 faults in clusters of simulated engines under Ray Serve, about 15 minutes
	@$(BIN)/python -m tests.chaos --only simulated

chaos-vllm: setup  ## 20 faults in clusters of real vLLM engines, their child processes included
	@$(BIN)/python -m tests.chaos --only vllm

drain: setup  ## 20 scale-downs and a rolling update under load: no request may fail
	@$(BIN)/python -m tests.chaos.drain --downs 20
