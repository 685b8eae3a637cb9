"""Metrics that every process exports."""

from __future__ import annotations

from sluice.telemetry.metrics import counter, gauge

INFO = gauge(
    "sluice_process_info",
    "always 1",
    "Which process this is, and its version.",
    *("process", "kind", "version"),
)
UPTIME = gauge("sluice_process_uptime_seconds", "seconds", "Age of the process.")
RESTARTS = counter(
    "sluice_process_restarts_total",
    "starts",
    "How often the launcher started this process again in this run.",
)
STILL = gauge(
    "sluice_watchdog_still_seconds",
    "seconds",
    "Time without progress although there is work; 0 while there is none.",
)
LONGEST_WAIT = gauge(
    "sluice_watchdog_longest_wait_seconds", "seconds", "The longest wait of the process."
)
WAITS = gauge("sluice_watchdog_waits", "waits", "Waits under way, for peers and for each other.")
RPC_ERRORS = counter(
    "sluice_rpc_errors_total",
    "calls",
    "gRPC calls that ended with an error, each attempt counted: answered (server) or received "
    "(client).",
    *("side", "method", "code"),
)
QUOTA_REFUSALS = counter(
    "sluice_quota_refusals_total",
    "requests",
    "Requests refused because a client already had as much in flight as a limit allows.",
    "limit",
)
CERTIFICATE_END = gauge(
    "sluice_certificate_end_seconds",
    "seconds since 1970",
    "When the certificates that it loaded at its start end: the first of cert_file, the last of "
    "ca_file.",
    "file",
)
RUN_FOLDER_FREE = gauge(
    "sluice_run_folder_free_bytes", "bytes", "Free space of the file system of the run's folder."
)
RUN_FOLDER_SIZE = gauge(
    "sluice_run_folder_size_bytes", "bytes", "Size of the file system of the run's folder."
)
TELEMETRY_CPU = counter(
    "sluice_telemetry_cpu_seconds_total",
    "CPU seconds",
    "What telemetry took of this process's own threads: to send or write spans, to answer scrapes.",
    "part",
)
TELEMETRY_SPANS = counter(
    "sluice_telemetry_spans_total",
    "spans",
    "Recorded spans that were sent or written, and those that were dropped; once for each "
    "destination.",
    "fate",
)
SCRAPE_COMPLETE = gauge(
    "sluice_scrape_complete",
    "0 or 1",
    "1 if the service's event loop answered this scrape; 0 if it is blocked or its numbers cannot "
    "be read, and the page has only what needs no loop.",
)
