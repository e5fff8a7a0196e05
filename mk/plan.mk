.PHONY: aiconfigurator plan-compare roofline-residuals experiments

AIC := $(HOME)/.cache/pdserve/aiconfigurator

aiconfigurator:  ## optional: AIConfigurator's measured tables, in an environment of its own in the user's cache
	@test -x $(AIC)/bin/python || $(PYTHON) -m venv $(AIC)
	@$(AIC)/bin/python -m pip install --quiet --disable-pip-version-check aiconfigurator==0.12.0

plan-compare: setup aiconfigurator  ## the planner beside AIConfigurator on three models, H100 and H200; about 2 minutes
	@$(BIN)/python -m cluster.planner.compare

experiments: setup  ## every file of loadtests/experiments, reports in out/experiments; about 15 minutes on two cores
	@for f in loadtests/experiments/*.yaml; do $(BIN)/pdserve experiment $$f || exit $$?; done

roofline-residuals: setup aiconfigurator  ## the roofline's errors against measured kernel tables, by GPU
	@$(BIN)/python -m cluster.planner.residuals
