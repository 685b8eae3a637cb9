// Ask for changes and show them, while the tab is visible.

import { showAccounts } from "./accounts.js";
import { ask, isExported, RefusedError, setToken } from "./api.js";
import { showComparison } from "./comparison.js";
import { showCurves, showNoCurves } from "./curves.js";
import { byId, setText, whenChanged } from "./dom.js";
import { showFleet, showProcesses } from "./fleet.js";
import { followLog, startLogs } from "./logs.js";
import { followMetrics, startMetrics } from "./metrics.js";
import { renewEmptyList, startSamples } from "./samples.js";
import { showSettings } from "./settings.js";
import { showStatus } from "./status.js";

const STATUS_MS = 1000;
const CURVES_EVERY = 3;
const REFUSED = 401;

const showChangedCurves = whenChanged(showCurves);
let rounds = 0;
let wasGiven = false; // whether the user typed a token
let compared = null; // the validation that the comparison shows

async function look() {
  const run = await ask("/api/overview", { isPolled: true });
  showStatus(run);
  showFleet(run.replicas);
  showProcesses(run.processes);
  showAccounts(run.accounts, run.prompts);
  if (rounds % CURVES_EVERY === 0 || run.is_reading) {
    showChangedCurves(await ask("/api/curves", { isPolled: true }));
    await followMetrics();
    await renewEmptyList();
  }
  if (!isExported) await followLog();
  if (rounds === 0) showSettings(await ask("/api/settings"));
  if (compared !== run.accuracy?.step) {
    showComparison(await ask("/api/comparison"));
    compared = run.accuracy?.step;
  }
  rounds += 1;
}

async function follow() {
  if (isExported || document.visibilityState === "visible") {
    try {
      await look();
      admitted();
    } catch (error) {
      failed(error);
    }
  }
  if (!isExported && byId("token-form").hidden) setTimeout(follow, STATUS_MS);
}

function admitted() {
  setText(byId("connection"), "");
  byId("run").hidden = false;
}

function failed(error) {
  if (error instanceof RefusedError && error.status === REFUSED) {
    byId("run").hidden = true;
    byId("token-form").hidden = false;
    setText(byId("token-error"), wasGiven ? "This token is not one of the run's." : "");
    setText(byId("verdict"), "asks for a token");
    byId("token").focus();
    return;
  }
  const why = error instanceof RefusedError ? error.message : "the page's server does not answer";
  setText(byId("connection"), `Not up to date: ${why}.`);
}

byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setToken(byId("token").value);
  wasGiven = true;
  byId("token").value = "";
  byId("token-form").hidden = true;
  rounds = 0;
  follow();
});
if (isExported) {
  for (const node of document.querySelectorAll(".live-only")) node.hidden = true;
  setText(
    byId("source"),
    "sluice, exported from the run's folder with the newest samples. `sluice dashboard` shows all.",
  );
}
showNoCurves();
startSamples(failed);
startMetrics(failed);
startLogs(failed);
follow();
