#!/usr/bin/env bash
# Puts promtool, Prometheus, Alertmanager (and kubectl where the machine has none) from Debian's packages into a
# folder, without installing them. Needs apt-get and dpkg, no root. Fails softly: tests that miss a tool say so.
set -u
into=${1:?folder}
have() { command -v "$1" >/dev/null 2>&1 || [ -x "$into/usr/bin/$1" ]; }

wanted=()
have prometheus && have promtool || wanted+=(prometheus promtool)
have prometheus-alertmanager || wanted+=(prometheus-alertmanager)
have kubectl || wanted+=(kubectl)
[ ${#wanted[@]} -eq 0 ] && exit 0
if ! command -v apt-get >/dev/null || ! command -v dpkg >/dev/null; then
  echo "k8s tools: no apt-get here; install ${wanted[*]} yourself, or their tests will be skipped" >&2
  exit 0
fi

mkdir -p "$into/apt/lists/partial" "$into/apt/archives/partial" "$into/deb"
: >"$into/apt/status"
into=$(cd "$into" && pwd)
private=(-o "Dir::State::lists=$into/apt/lists" -o "Dir::Cache=$into/apt" -o "Dir::State::status=$into/apt/status"
  -o APT::Sandbox::User=root -o Acquire::Retries=1)
echo "k8s tools: fetching ${wanted[*]} into $into (about 30 MB, once)" >&2
timeout 180 apt-get "${private[@]}" -qq update >/dev/null 2>&1
for package in "${wanted[@]}"; do
  # promtool is its own package only in newer releases; kubectl is one only there.
  (cd "$into/deb" && timeout 180 apt-get "${private[@]}" -qq download "$package" >/dev/null 2>&1) || true
done
for file in "$into"/deb/*.deb; do
  [ -e "$file" ] && dpkg -x "$file" "$into"
done
rm -rf "$into/apt" "$into/deb"
for tool in promtool prometheus prometheus-alertmanager kubectl; do
  have "$tool" || echo "k8s tools: $tool could not be had; its tests will be skipped" >&2
done
exit 0
