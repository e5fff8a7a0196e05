.PHONY: aiconfigurator plan-compare

aiconfigurator:  ## optional: AIConfigurator's measured tables, in an environment of its own in the user's cache
	@test -x $(HOME)/.cache/pdserve/aiconfigurator/bin/python || $(PYTHON) -m venv $(HOME)/.cache/pdserve/aiconfigurator
	@$(HOME)/.cache/pdserve/aiconfigurator/bin/python -m pip install --quiet --disable-pip-version-check aiconfigurator==0.12.0
