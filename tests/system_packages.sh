#!/bin/sh
# What only tests of the sweeps need from the system: a real Prometheus, a browser, and a model checker. Installed where that is possible without
# asking anybody (Debian, as root); elsewhere the tests that need them are skipped and say so.
missing=""
command -v prometheus >/dev/null 2>&1 && command -v promtool >/dev/null 2>&1 || missing="$missing prometheus"
command -v chromium >/dev/null 2>&1 && command -v chromedriver >/dev/null 2>&1 || missing="$missing chromium chromium-driver"
command -v spin >/dev/null 2>&1 && command -v gcc >/dev/null 2>&1 || missing="$missing spin gcc libc6-dev"
test -n "$missing" || exit 0
if test "$(id -u)" != 0 || ! command -v apt-get >/dev/null 2>&1; then
    echo "not installed:$missing; their tests will be skipped"
    exit 0
fi
# RUNLEVEL=1: the packages' services are not started.
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
install() { timeout 300 apt-get install -y -q --no-install-recommends $missing >/dev/null 2>&1; }
install || { timeout 120 apt-get update -q >/dev/null 2>&1 && install; } || echo "cannot be installed:$missing; their tests will be skipped"
exit 0
