// The replicas.

import { byId, element, whenChanged } from "./dom.js";
import { count, share } from "./number_text.js";

const COLUMNS = 7;
const STATES = {
  serving: "serving",
  held: "held: keeps its version for a validation",
  pending: "pending: receives its weights",
  stalled: "stalled: has work and generates nothing",
  draining: "draining: finishes its work, then leaves",
};

export const showFleet = whenChanged((replicas) => {
  const rows = replicas.map(row);
  const none = element("td", { colspan: COLUMNS, class: "hint" }, "No replica is known.");
  byId("fleet-table").tBodies[0].replaceChildren(
    ...(rows.length ? rows : [element("tr", {}, none)]),
  );
});

export const showProcesses = whenChanged((processes) => {
  const none = element("td", { colspan: 4, class: "hint" }, "No launcher of this run answers here.");
  byId("process-table").tBodies[0].replaceChildren(
    ...(processes.length ? processes.map(processRow) : [element("tr", {}, none)]),
  );
});

function processRow({ name, pid, restarts, is_draining: isDraining }) {
  const state = isDraining ? "leaving" : pid ? "running" : restarts ? "being restarted" : "starting";
  return element(
    "tr",
    {},
    element("th", { scope: "row" }, name),
    element("td", { class: state === "being restarted" ? "failure" : null }, state),
    element("td", { class: "number" }, restarts),
    element("td", { class: "number" }, pid || "-"),
  );
}

function row(replica) {
  return element(
    "tr",
    {},
    element("th", { scope: "row" }, replica.name),
    element(
      "td",
      { class: replica.state === "stalled" ? "failure" : null },
      STATES[replica.state] ?? replica.state,
    ),
    element("td", { class: "number" }, replica.version < 0 ? "-" : replica.version),
    element("td", { class: "number" }, `${replica.slots_busy} of ${replica.slots}`),
    element("td", { class: "number" }, count(replica.tokens_per_second)),
    element("td", { class: "number" }, share(replica.idle_share)),
    element("td", {}, replica.address),
  );
}
