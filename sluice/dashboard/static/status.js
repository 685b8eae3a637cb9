// The first lines: the health of the run, its progress, and what it waits for.

import { isExported } from "./api.js";
import { byId, element, setText, whenChanged } from "./dom.js";
import { count, duration, fixed } from "./number_text.js";

const MIN_REPORTED_S = 1;
const AT_REST = new Set(["finished", "not running"]);

export function showStatus(run) {
  showName(run.name);
  showVerdict(run.health, run.is_reading);
  showReasons(run.reasons);
  const isOver = AT_REST.has(run.health);
  const hasNoTime = isOver || run.phase_seconds === null;
  const since = hasNoTime ? "" : `, for ${duration(run.phase_seconds)}`;
  setText(byId("fact-phase"), `${run.phase}${since}`);
  showStep(run);
  setText(byId("fact-accuracy"), accuracyText(run));
  setText(byId("fact-reward"), fixed(run.reward, 2));
  setText(byId("fact-tokens"), speedText(run));
  byId("fact-wait").parentElement.hidden = isOver || isExported;
  setText(byId("fact-wait"), waitText(run));
}

const showName = whenChanged((name) => {
  setText(byId("run-name"), name);
  document.title = `${name} · sluice`;
});

// Screen readers announce it when it changes, unlike numbers that change every second.
const showVerdict = whenChanged((health, isReading) => {
  setText(byId("verdict"), isReading ? `${health} (reading the run's files)` : health);
  byId("verdict").dataset.verdict = health;
});

const showReasons = whenChanged((reasons) => {
  byId("reasons").replaceChildren(...reasons.map((reason) => element("li", {}, reason)));
});

function showStep({ step, total_steps: total, training_seconds: seconds }) {
  const done = total ? `${count(step)} of ${count(total)}` : count(step);
  setText(byId("fact-step"), seconds ? `${done} in ${duration(seconds)}` : done);
  const progress = byId("fact-progress");
  progress.hidden = !total;
  progress.max = total || 1;
  progress.value = step;
}

function accuracyText({ accuracy, first_accuracy: first }) {
  if (!accuracy) return "-";
  const before = first ? `, from ${fixed(first.value)}` : "";
  return `${fixed(accuracy.value)} (step ${accuracy.step}${before})`;
}

// Of the last step, because a fleet may be idle between batches; and now.
function speedText({ tokens_per_s: ofStep, tokens_per_s_now: now }) {
  return now === null ? count(ofStep) : `${count(ofStep)} (now ${count(now)})`;
}

function waitText({ wait, awaited }) {
  const longest = awaited.reduce((a, b) => (b.seconds > (a?.seconds ?? 0) ? b : a), null);
  if (wait?.root) return `${wait.cause}`;
  if (longest && longest.seconds >= MIN_REPORTED_S) {
    return `${longest.peer}: ${longest.phase}, for ${duration(longest.seconds)}`;
  }
  return "no service for longer than a second";
}
