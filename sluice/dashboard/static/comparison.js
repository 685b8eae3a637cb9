// Responses to the same problems before and after training.

import { byId, element, setText, whenChanged } from "./dom.js";
import { short } from "./number_text.js";

export const showComparison = whenChanged(({ before, after, pairs }) => {
  byId("comparison-table").hidden = !pairs.length;
  setText(
    byId("comparison-note"),
    pairs.length
      ? `The first ${pairs.length} problems of the validation set, not chosen; one sampled ` +
          "response each."
      : "They come with the second validation that records example responses.",
  );
  setText(byId("comparison-before"), `Before (step ${before})`);
  setText(byId("comparison-after"), `After (step ${after})`);
  byId("comparison-table").tBodies[0].replaceChildren(...pairs.map(row));
});

function row({ prompt, ground_truth: groundTruth, before, after }) {
  return element(
    "tr",
    {},
    element("td", {}, text(prompt), element("p", { class: "hint" }, `Ground truth: ${groundTruth}`)),
    cell(before),
    cell(after),
  );
}

function cell({ text: response, score }) {
  const isRight = score !== null && score > 0;
  const grade = score === null ? "no score" : `${isRight ? "✓" : "✗"} score ${short(score)}`;
  return element(
    "td",
    {},
    text(response || "(empty)"),
    element("p", { class: isRight ? "success" : "failure" }, grade),
  );
}

function text(content) {
  return element("pre", {}, content);
}
