TRACES ?= ../shared/traces

.PHONY: autoscale-report
autoscale-report: setup  ## the goodput policy against queue length, mean latency, static and oracle (about 16 minutes; AUTOSCALE_ARGS=--quick: 5)
	@$(BIN)/python -m cluster.autoscale_report --traces $(TRACES) $(AUTOSCALE_ARGS)
