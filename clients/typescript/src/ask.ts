/**
 * Asks one layer and writes its rows: node dist/ask.js ADDRESS CALL.json
 *
 * CALL.json has layer and the tensors hidden, ids and weights, each with dtype, shape and the name of the file of its
 * bytes, and `answer`, the file to write. Prints the answer's dtype and shape as JSON. No deadline is set.
 */

import { readFileSync, writeFileSync } from "node:fs";

import { MoeClient, type DType, type Tensor } from "./client";

interface Stored {
  dtype: DType;
  shape: number[];
  file: string;
}

interface Call {
  layer: number;
  hidden: Stored;
  ids: Stored;
  weights: Stored;
  answer: string;
}

function read(stored: Stored): Tensor {
  return { dtype: stored.dtype, shape: stored.shape, data: readFileSync(stored.file) };
}

async function main(): Promise<void> {
  const [address, file] = process.argv.slice(2);
  if (address === undefined || file === undefined) {
    throw new Error("usage: node dist/ask.js ADDRESS CALL.json");
  }
  const call = JSON.parse(readFileSync(file, "utf-8")) as Call;
  const client = new MoeClient(address);
  try {
    const model = await client.model();
    const choice = { ids: read(call.ids), weights: read(call.weights) };
    const answer = await client.forward(call.layer, read(call.hidden), choice);
    writeFileSync(call.answer, answer.hidden.data);
    const { dtype, shape } = answer.hidden;
    console.log(JSON.stringify({ dtype, shape, layers: model.layers.length }));
  } finally {
    client.close();
  }
}

main().catch((error: unknown) => {
  console.error(error instanceof Error ? error.message : error);
  process.exitCode = 1;
});
