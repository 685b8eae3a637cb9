// Samples from a replica and submits prompts, over gRPC and from the protos alone: they are read when
// it starts, and `npm run check` generates types from them that this file is held against.
//
//   node client.mjs ADDRESS PROTO_FOLDER
//
// Prints a JSON object a line: the prompt as the model reads it, tokens as they are sampled, whole
// samples, then receipts and outcomes of prompts, and last how the services refuse a request.

import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const [address, protoFolder] = process.argv.slice(2);
const definition = protoLoader.loadSync(
  ["sluice/api/rollout/v1/rollout.proto", "sluice/api/reward/v1/reward.proto"],
  { includeDirs: [protoFolder], keepCase: true, longs: Number, enums: String, defaults: true },
);
/**
 * What `npm run types` generates.
 * @typedef {import("./node_modules/sluice-types/rollout.js").ProtoGrpcType} Rollout
 * @typedef {import("./node_modules/sluice-types/reward.js").ProtoGrpcType} Reward
 * @typedef {import("./node_modules/sluice-types/sluice/api/rollout/v1/RolloutService.js").RolloutServiceClient} Replica
 * @typedef {import("./node_modules/sluice-types/sluice/api/reward/v1/RewardService.js").RewardServiceClient} Service
 * @typedef {import("./node_modules/sluice-types/sluice/api/rollout/v1/GenerateResponse.js").GenerateResponse__Output} Generated
 * @typedef {import("./node_modules/sluice-types/sluice/api/reward/v1/SubmitPromptsResponse.js").SubmitPromptsResponse__Output} Reported
 */
const loaded = /** @type {Rollout & Reward} */ (
  /** @type {unknown} */ (grpc.loadPackageDefinition(definition))
);
const { rollout, reward } = loaded.sluice.api;
const open = grpc.credentials.createInsecure();
const deadline = () => ({ deadline: Date.now() + 30_000 });
const tell = (/** @type {object} */ what) => console.log(JSON.stringify(what));

/**
 * Arrays travel as little-endian bytes, four an item.
 * @param {Buffer} bytes
 * @param {"readUInt32LE" | "readFloatLE"} read
 */
const items = (bytes, read) =>
  Array.from({ length: bytes.length / 4 }, (_, index) => bytes[read](4 * index));

/** @param {Replica} replica */
async function generate(replica) {
  const call = replica.Generate(
    {
      prompt: { chat: { messages: [{ role: "user", content: "hi" }] } },
      sample_indexes: [0, 1],
      sampling: { temperature: 0.5, max_tokens: 16, seed: 7 },
      stream_mode: "STREAM_MODE_TOKENS",
    },
    deadline(),
  );
  for await (const each of call) {
    const message = /** @type {Generated} */ (each);
    if (message.accepted) {
      const { prompt_token_ids_u32, policy_version } = message.accepted;
      tell({ prompt: items(prompt_token_ids_u32, "readUInt32LE"), version: policy_version });
    }
    for (const delta of message.deltas) {
      tell({
        sample: delta.sample_index,
        tokens: items(delta.token_ids_u32, "readUInt32LE"),
        logprobs: items(delta.behavior_logprobs_f32, "readFloatLE"),
        text: delta.text,
      });
    }
    for (const ended of message.rollouts) {
      tell({ ended: ended.sample_index, reason: ended.finish_reason, text: ended.text });
    }
  }
}

/** @param {Service} service */
async function submit(service) {
  const call = service.SubmitPrompts(deadline());
  for (const prompt_id of ["a", "bad"]) {
    call.write({
      prompt_id,
      messages: [{ role: "user", content: "2 + 2?" }],
      data_source: "math_dapo",
      ground_truth: "4",
    });
  }
  call.end();
  for await (const each of call) {
    const { receipt, outcome } = /** @type {Reported} */ (each);
    if (receipt) tell({ prompt_id: receipt.prompt_id, refused: receipt.refused_because });
    if (outcome) tell({ prompt_id: outcome.prompt_id, end: outcome.end, step: outcome.step });
  }
}

/** @param {Replica} replica */
async function refusal(replica) {
  try {
    for await (const _ of replica.Generate({ sample_indexes: [] }, deadline()));
  } catch (error) {
    const { code, details, metadata } = /** @type {grpc.ServiceError} */ (error);
    const [kind] = metadata.get("sluice-error");
    tell({ code: grpc.status[code], kind: kind ?? "", details });
  }
}

const replica = new rollout.v1.RolloutService(address, open);
const service = new reward.v1.RewardService(address, open);
await generate(replica);
await submit(service);
await refusal(replica);
replica.close();
service.close();
