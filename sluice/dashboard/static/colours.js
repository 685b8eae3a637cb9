// One colour for each meaning, in charts and in accounts. Green is what the run is for.

const MEANINGS = {
  green: ["trained", "kept", "training", "generating"],
  cyan: ["all right"],
  purple: ["all wrong"],
  orange: ["stale"],
  red: ["failed", "aborted", "prompts lost"],
  olive: ["evaluation", "evaluating"],
  ink: ["publishing", "swapping"],
  brown: ["saving"],
  silver: ["starting", "pending", "under way"],
};
const STYLES = new Map(
  Object.entries(MEANINGS).flatMap(([style, names]) => names.map((name) => [name, style])),
);

// The style of a part of an account or of an outcome; what has no meaning of its own is grey.
export function styleOf(name) {
  return STYLES.get(name.replaceAll("_", " ").replace(/^(filtered|dropped) /, "")) ?? "grey";
}

// Runs side by side differ in colour and in dashes.
export const RUN_STYLES = ["ink", "orange dashed", "cyan", "purple dashed", "olive", "grey dashed"];
