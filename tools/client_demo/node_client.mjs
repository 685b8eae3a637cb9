// One client of the demo in Node, from the protos alone.
//
//   node node_client.mjs PROTO_FOLDER FOLDER_OF_NODE_MODULES
//
// Input and output as of python_client.py. Replicas are those that the trainer reports as serving; a request
// goes to the one with the smallest share of this client's own samples, a refused or broken one is
// tried again with a growing wait, and a failure of another kind is reported with its kind.

import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const [protoFolder, packages] = process.argv.slice(2);
const require = createRequire(`${packages}/package.json`);
const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");

const definition = protoLoader.loadSync(
  ["sluice/api/rollout/v1/rollout.proto", "sluice/api/trainer/v1/trainer.proto"],
  { includeDirs: [protoFolder], keepCase: true, longs: Number, enums: String, defaults: true },
);
const { rollout, trainer } = grpc.loadPackageDefinition(definition).sluice.api;
const open = grpc.credentials.createInsecure();
const FRESH_MS = 2000;
const [FIRST_WAIT_MS, MAX_WAIT_MS] = [100, 5000];
const { RESOURCE_EXHAUSTED, UNAVAILABLE, CANCELLED, DEADLINE_EXCEEDED } = grpc.status;
const TRANSIENT = new Set([RESOURCE_EXHAUSTED, UNAVAILABLE, CANCELLED]);
const tell = (what) => process.stdout.write(`${JSON.stringify(what)}\n`);
const pause = (ms) => new Promise((resume) => setTimeout(resume, ms));
const seconds = (since) => (performance.now() - since) / 1000;

class Fleet {
  constructor(address) {
    this.trainer = new trainer.v1.TrainerService(address, open);
    this.stubs = new Map();
    this.underWay = new Map();
    this.failedAt = new Map();
    this.heard = 0;
    this.replicas = [];
  }

  async choose() {
    if (Date.now() - this.heard > FRESH_MS) await this.ask();
    const rank = ({ address, slots }) =>
      (Date.now() - (this.failedAt.get(address) ?? 0) < FRESH_MS ? 1e6 : 0) +
      (this.underWay.get(address) ?? 0) / Math.max(slots, 1);
    const [best] = [...this.replicas].sort((a, b) => rank(a) - rank(b));
    if (!best) throw Object.assign(new Error("no replica serves"), { code: UNAVAILABLE });
    return best.address;
  }

  async ask() {
    const status = await new Promise((settle, refuse) => {
      const deadline = { deadline: Date.now() + 10_000 };
      this.trainer.GetStatus({}, deadline, (error, found) => {
        if (!error) return settle(found);
        // This deadline is ours, not the prompt's: ask again.
        if (error.code === DEADLINE_EXCEEDED) error.code = UNAVAILABLE;
        refuse(error);
      });
    });
    this.replicas = status.replicas
      .filter(({ state }) => state === "serving")
      .map(({ replica }) => replica);
    this.heard = Date.now();
  }

  stub(address) {
    if (!this.stubs.has(address)) {
      this.stubs.set(address, new rollout.v1.RolloutService(address, open));
    }
    return this.stubs.get(address);
  }

  count(address, change) {
    this.underWay.set(address, (this.underWay.get(address) ?? 0) + change);
  }

  failed(address) {
    this.failedAt.set(address, Date.now());
    this.heard = 0;
  }
}

// The sample's number of tokens, or an error; `onToken` is called when tokens come.
async function attempt(fleet, address, request, deadline, metadata, onToken) {
  const call = fleet.stub(address).Generate(request, metadata, { deadline });
  let tokens = null;
  fleet.count(address, 1);
  try {
    for await (const message of call) {
      if (message.deltas.length) onToken();
      for (const ended of message.rollouts) {
        const sampled = ended.token_ids_u32.length / 4;
        if (ended.behavior_logprobs_f32.length / 4 !== sampled) throw new Error("logprobs are missing");
        if (ended.finish_reason !== "FINISH_REASON_ABORTED") tokens = sampled;
      }
    }
  } finally {
    fleet.count(address, -1);
    call.cancel();
  }
  if (tokens === null) {
    throw Object.assign(new Error("it ended without the sample"), { code: UNAVAILABLE });
  }
  return tokens;
}

async function answer(fleet, [number, messages], task, metadata) {
  const since = performance.now();
  const deadline = Date.now() + 1000 * task.deadline_s;
  const request = {
    prompt: { chat: { messages } },
    sample_indexes: [0],
    sampling: { temperature: 1, max_tokens: task.max_tokens, seed: number },
    stream_mode: "STREAM_MODE_TOKENS",
  };
  let firstS = null;
  const onToken = () => {
    if (firstS !== null) return;
    firstS = seconds(since);
    tell({ began: number }); // Node writes to a pipe at once.
    if (task.vanish_at !== null && number >= task.vanish_at) process.kill(process.pid, "SIGKILL");
  };
  for (let retries = 0; ; retries += 1) {
    let address = null;
    try {
      address = await fleet.choose();
      const tokens = await attempt(fleet, address, request, deadline, metadata, onToken);
      const total = seconds(since);
      tell({ done: number, seconds: total, first_s: firstS ?? total, tokens, retries });
      return;
    } catch (error) {
      if (address) fleet.failed(address);
      if (!TRANSIENT.has(error.code) || Date.now() > deadline) {
        const [kind] = error.metadata?.get("sluice-error") ?? [];
        tell({ failed: number, error: `${kind ?? error.code}: ${error.details ?? error.message}` });
        return;
      }
      const wait = Math.min(FIRST_WAIT_MS * 2 ** Math.min(retries, 16), MAX_WAIT_MS);
      await pause(wait * (0.5 + Math.random() / 2));
    }
  }
}

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const task = JSON.parse((await lines.next()).value);
const metadata = new grpc.Metadata();
metadata.set("sluice-client", task.name);
const fleet = new Fleet(task.trainer);
for (let asks = true; asks; ) {
  try {
    await fleet.ask();
    asks = false;
  } catch (error) {
    if (!TRANSIENT.has(error.code)) throw error;
    await pause(FIRST_WAIT_MS);
  }
}
tell({ ready: true });
await lines.next();
const waiting = [...task.prompts];
const work = async () => {
  while (waiting.length) await answer(fleet, waiting.shift(), task, metadata);
};
await Promise.all(Array.from({ length: task.concurrency }, work));
process.exit(0);
