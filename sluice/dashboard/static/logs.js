// The newest lines of a service's log, while they are on the screen.

import { ask } from "./api.js";
import { byId, element, setText, whenChanged } from "./dom.js";
import { count, visible } from "./number_text.js";

let isSeen = false;

export function startLogs(onError) {
  const log = byId("logs");
  new IntersectionObserver(([{ isIntersecting }]) => {
    isSeen = isIntersecting;
    if (isSeen) followLog().catch(onError);
  }).observe(log);
  byId("log-service").addEventListener("change", () => followLog().catch(onError));
}

export async function followLog() {
  if (!isSeen) return;
  const wanted = byId("log-service").value;
  const answer = await ask(`/api/logs?${new URLSearchParams({ service: wanted })}`, {
    isPolled: true,
  });
  showServices(answer.services);
  if (wanted !== byId("log-service").value) return followLog();
  showLines(answer.lines);
  setText(byId("log-note"), noteOf(answer));
}

function noteOf({ services, lines, is_cut: isCut }) {
  if (!services.length) return "The run's folder holds no logs; its processes may log elsewhere.";
  return `${isCut ? "The newest " : ""}${count(lines.length)} lines`;
}

const showServices = whenChanged((services) => {
  const select = byId("log-service");
  const chosen = select.value;
  select.replaceChildren(...services.map((name) => element("option", { value: name }, name)));
  if (services.includes(chosen)) select.value = chosen;
});

// It stays at its end, unless somebody scrolled up to read.
const showLines = whenChanged((lines) => {
  const log = byId("log");
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  log.replaceChildren(
    ...lines.map((line) => element("span", { class: levelOf(line) }, `${visible(line)}\n`)),
  );
  if (isAtEnd) log.scrollTop = log.scrollHeight;
});

function levelOf(line) {
  const level = line.slice(0, 20);
  if (/\b(ERROR|CRITICAL)\b/.test(level)) return "failure";
  return /\bWARNING\b/.test(level) ? "warning" : null;
}
