// The configuration: what differs from the defaults, and everything.

import { dataTable } from "./chart.js";
import { byId, element, whenChanged } from "./dom.js";
import { visible } from "./number_text.js";

export const showSettings = whenChanged(({ settings, versions }) => {
  const changed = settings.filter((one) => one.is_changed);
  byId("settings-changed").replaceChildren(
    settings.length
      ? table("Differs from the default", changed)
      : element("p", { class: "hint" }, "The run's folder holds no configuration that can be read."),
    element("p", { class: "hint" }, Object.entries(versions).map((one) => visible(one.join(" "))).join(", ")),
  );
  const search = element("input", { type: "search", id: "setting", autocomplete: "off" });
  const label = element("label", { for: "setting" }, "Part of a key or value ");
  const found = element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "All settings" });
  const show = () => {
    const part = search.value.toLowerCase();
    const shown = settings.filter(({ key, value }) => `${key} ${value}`.toLowerCase().includes(part));
    found.replaceChildren(table(`${shown.length} of ${settings.length} settings`, shown));
  };
  search.addEventListener("input", show);
  show();
  byId("settings-all").replaceChildren(element("summary", {}, "All settings"), label, search, found);
});

function table(caption, rows) {
  const cells = rows.map(({ key, value, default: usual }) => [
    setting(key),
    setting(value),
    setting(usual ?? "-"),
  ]);
  return dataTable(caption, ["Key", "Value", "Default"], cells, { isText: true });
}

// A key breaks between its parts.
export function setting(text) {
  const parts = visible(text).split(/(?<=\.)(?=[a-z])/);
  const nodes = parts.flatMap((part, place) => (place ? [element("wbr"), part] : [part]));
  return element("span", { class: "setting" }, ...nodes);
}
