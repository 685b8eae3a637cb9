// The accounting: what all tokens and all seconds of trainer and replicas were used for, and how
// prompts ended.

import { dataTable, shareBar, swatch } from "./chart.js";
import { styleOf } from "./colours.js";
import { byId, element, whenChanged } from "./dom.js";
import { count, duration, share } from "./number_text.js";

const TITLES = {
  tokens: "Tokens, by use",
  trainer: "Trainer's time",
  rollout: "Replicas' time, summed",
};
export const showAccounts = whenChanged((accounts, prompts) => {
  const panels = accounts.map(account);
  if (prompts.submitted) panels.push(promptAccount(prompts));
  if (panels.length) byId("accounts").replaceChildren(...panels);
});

function account({ title, total, parts, residual, residual_share: residualShare }) {
  const write = title === "tokens" ? count : duration;
  const rows = parts.map((part) => [part.name, part.amount, part.share]);
  const residue = ["unaccounted", write(residual), share(residualShare)];
  const name = `${TITLES[title] ?? title}: ${write(total)}`;
  return panel(name, "Since the processes started", rows, write, [residue]);
}

function promptAccount({ submitted, ...ends }) {
  const rows = Object.entries(ends)
    .filter(([, amount]) => amount > 0)
    .sort(([, a], [, b]) => b - a)
    .map(([name, amount]) => [name.replaceAll("_", " "), amount, amount / submitted]);
  return panel(`Prompts, by outcome: ${count(submitted)} submitted`, "Since the start", rows, count);
}

function panel(title, caption, rows, write, more = []) {
  const styled = rows.map(([name, amount, part]) => ({
    name,
    amount,
    share: part,
    style: styleOf(name),
  }));
  const cells = styled.map((row) => [named(row), write(row.amount), share(row.share)]);
  return element(
    "div",
    { class: "account" },
    element("h3", {}, title),
    shareBar(styled),
    dataTable(caption, ["Part", "Amount", "Share"], [...cells, ...more]),
  );
}

function named({ name, style }) {
  return element("span", { class: "share-name" }, swatch(`area ${style}`), name);
}
