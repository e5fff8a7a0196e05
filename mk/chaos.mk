.PHONY: chaos chaos-memory chaos-simulated chaos-vllm drain

chaos: chaos-memory chaos-simulated chaos-vllm  ## kill and stop workers under load; every token checked

chaos-memory: setup  ## 300 faults in virtual time: dispatcher and lifecycle over pools in memory, under a minute
	@$(BIN)/python -m tests.chaos.memory --faults 300

chaos-simulated: setup  ## 200 faults in clusters of simulated engines under Ray Serve, about 15 minutes
	@$(BIN)/python -m tests.chaos.run --engine simulated --faults 200 --campaigns 3 --gap-s 1.2

chaos-vllm: setup  ## 20 faults in clusters of real vLLM engines, their child processes included
	@$(BIN)/python -m tests.chaos.run --engine vllm --faults 20 --campaigns 2 --prefill 2 --decode 2 --routers 1 --concurrency 4 --gap-s 4

drain: setup  ## 20 scale-downs and a rolling update under load: no request may fail
	@$(BIN)/python -m tests.chaos.drain --downs 20
