// An environment in JavaScript, from the protos alone: a calculator that adds.
//
//   node environment.mjs PROTO_FOLDER
//
// Prints its port. Ends with its input.

import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const definition = protoLoader.loadSync("sluice/api/environment/v1/environment.proto", {
  includeDirs: [process.argv[2]],
  keepCase: true,
  defaults: true,
});
const { EnvironmentService } =
  /** @type {any} */ (grpc.loadPackageDefinition(definition)).sluice.api.environment.v1;

const tool = {
  name: "add",
  description: "Add two numbers.",
  parameters_json: JSON.stringify({
    type: "object",
    properties: { a: { type: "number" }, b: { type: "number" } },
    required: ["a", "b"],
  }),
};
/** Open episodes: the row's answer, and what the policy said last.
 * @type {Map<string, {truth: string, last: string}>} */
const episodes = new Map();

/** What the policy reads; it reads there what it did wrong. @param {any} call */
const result = (call) => {
  try {
    const { a, b } = JSON.parse(call.arguments_json);
    if (typeof a !== "number" || typeof b !== "number") throw new TypeError("a and b are numbers");
    return { content: `${a + b}`, is_error: false };
  } catch (error) {
    return { content: `Error: ${error}`, is_error: true };
  }
};

/** @typedef {(error: any, response?: any) => void} Reply */
const server = new grpc.Server();
server.addService(EnvironmentService.service, {
  Open: (/** @type {any} */ { request }, /** @type {Reply} */ reply) => {
    const truth = JSON.parse(request.row_json).ground_truth;
    episodes.set(request.episode_id, { truth, last: "" });
    reply(null, { observation: { tools: [tool] } });
  },
  Step: (/** @type {any} */ { request }, /** @type {Reply} */ reply) => {
    const episode = episodes.get(request.episode_id);
    if (!episode) return reply({ code: grpc.status.NOT_FOUND, details: "no such episode" });
    const { tool_calls, tool_error, content } = request.answer;
    episode.last = content;
    const messages = tool_calls.map((/** @type {any} */ call) => ({
      role: "tool",
      ...result(call),
      tool_call_id: call.id,
    }));
    if (tool_error) messages.push({ role: "tool", content: `Error: ${tool_error}`, is_error: true });
    reply(null, { observation: { messages, done: !messages.length } });
  },
  Close: (/** @type {any} */ { request }, /** @type {Reply} */ reply) => {
    const episode = episodes.get(request.episode_id);
    if (!episode) return reply({ code: grpc.status.NOT_FOUND, details: "no such episode" });
    episodes.delete(request.episode_id);
    const score = Number(episode.last.trim() === episode.truth);
    reply(null, request.is_abandoned ? {} : { score: { score, reward: score } });
  },
  GetStatus: (/** @type {any} */ _call, /** @type {Reply} */ reply) =>
    reply(null, { episodes: episodes.size }),
});
server.bindAsync("127.0.0.1:0", grpc.ServerCredentials.createInsecure(), (error, port) => {
  if (error) throw error;
  console.log(port);
});
process.stdin.on("end", () => process.exit(0)).resume();
