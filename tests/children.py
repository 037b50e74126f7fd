"""Processes of the tests' own, to be killed: one server imports what they need, and each child is a fork of it."""

import multiprocessing
import os

PATIENCE = float(os.environ.get("TEST_PATIENCE", "1"))  # times longer to wait, on a machine that has much else to do
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.faults.bundles", "tests.faults.stages"])
