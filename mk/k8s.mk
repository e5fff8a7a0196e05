.PHONY: test-k8s k8s-tools k8s-render

K8S_OVERLAYS := cpu-demo gpu

k8s-tools: setup  # promtool, Prometheus, Alertmanager from Debian's packages, unpacked beside the packages
	@bash tests/k8s/fetch_tools.sh $(VENV)/k8s-tools

test-k8s: setup k8s-tools  ## manifests, schemas, rules, alerts; no cluster needed, under a minute
	@$(BIN)/python -m pytest tests/k8s -q

k8s-render: setup  ## render k8s/overlays/* again after a change of their config.yaml
	@for o in $(K8S_OVERLAYS); do \
	  $(BIN)/pdserve k8s render k8s/overlays/$$o/config.yaml --out k8s/overlays/$$o/rendered || exit $$?; done
