.PHONY: chaos chaos-simulated chaos-vllm

chaos: chaos-simulated chaos-vllm  ## kill and stop processes of a cluster under load; every token checked

chaos-simulated: setup  ## 200 faults in a cluster of simulated engines under Ray Serve
	@$(BIN)/python -m tests.chaos.run --engine simulated --faults 200

chaos-vllm: setup  ## 20 faults in a cluster of real vLLM engines, their child processes included
	@$(BIN)/python -m tests.chaos.run --engine vllm --faults 20 --prefill 2 --decode 2 --routers 1 --concurrency 4 --gap-s 6

.PHONY: drain
drain: setup  ## 20 scale-downs and a rolling update under load: no request may fail
	@$(BIN)/python -m tests.chaos.drain --downs 20
