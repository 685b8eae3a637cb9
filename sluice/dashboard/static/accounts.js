// The books: what became of all tokens, and of the seconds of trainer and replicas.

import { dataTable, shareBar, swatch } from "./chart.js";
import { byId, element, whenChanged } from "./dom.js";
import { count, duration, share } from "./number_text.js";

const TITLES = {
  tokens: "Tokens, by what became of them",
  trainer: "Trainer's time",
  rollout: "Replicas' time, added up",
};
const STYLES = ["blue", "orange", "green", "purple", "red", "grey"];

export const showAccounts = whenChanged((accounts) => {
  if (accounts.length) byId("accounts").replaceChildren(...accounts.map(account));
});

function account({ title, total, parts, residual, residual_share: residualShare }) {
  const told = title === "tokens" ? count : duration;
  const styled = parts.map((part, place) => ({
    ...part,
    style: STYLES[Math.min(place, STYLES.length - 1)],
  }));
  const rows = styled.map((part) => [named(part), told(part.amount), share(part.share)]);
  rows.push(["in no account", told(residual), share(residualShare)]);
  return element(
    "div",
    { class: "account" },
    element("h3", {}, `${TITLES[title] ?? title}: ${told(total)}`),
    shareBar(styled),
    dataTable("Since the processes started", ["Part", "Amount", "Share"], rows),
  );
}

function named({ name, style }) {
  return element("span", { class: "share-name" }, swatch(`area ${style}`), name);
}
