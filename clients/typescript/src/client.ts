/** A client of moeserve's gRPC contract: asks one layer's experts for mixed rows. Made from moe.proto. */

import * as path from "node:path";

import * as grpc from "@grpc/grpc-js";
import * as loader from "@grpc/proto-loader";

import { checkAddress } from "./address";
import type { ProtoGrpcType } from "./generated/moe";
import type { FrontServiceClient } from "./generated/moeserve/v1/FrontService";
import type { ForwardReply__Output } from "./generated/moeserve/v1/ForwardReply";
import type { GetModelReply__Output } from "./generated/moeserve/v1/GetModelReply";
import type { Tensor as TensorMessage } from "./generated/moeserve/v1/Tensor";

const PROTO = path.resolve(__dirname, "../../../moeserve/proto/moe.proto");
const READING = { keepCase: true, longs: Number, enums: String, defaults: true, oneofs: true };

export type DType = "DTYPE_FP32" | "DTYPE_BF16" | "DTYPE_FP16" | "DTYPE_INT32" | "DTYPE_INT64";

/** A dense tensor: row-major, little-endian, no padding. */
export interface Tensor {
  dtype: DType;
  shape: number[];
  data: Buffer;
}

/** Experts that the caller chose: ids [T, K] int32 or int64, -1 = none, and their final weights [T, K]. */
export interface Choice {
  ids: Tensor;
  weights: Tensor;
}

/** What a layer answered, and the version of its weights that computed it. */
export interface Mixed {
  hidden: Tensor;
  epoch: number;
  weightsVersion: number;
}

export class MoeClient {
  private readonly front: FrontServiceClient;

  /**
   * @param address host:port of the service. @param maxMessageBytes largest message either way.
   * Throws RangeError for an address without a port, or an IPv6 one without brackets.
   */
  constructor(address: string, maxMessageBytes = 256 * 2 ** 20) {
    checkAddress(address);
    const found = grpc.loadPackageDefinition(loader.loadSync(PROTO, READING)) as unknown as ProtoGrpcType;
    this.front = new found.moeserve.v1.FrontService(address, grpc.credentials.createInsecure(), {
      "grpc.max_receive_message_length": maxMessageBytes,
      "grpc.max_send_message_length": maxMessageBytes,
    });
  }

  /** The description of the model that is served. Rejects with a grpc.ServiceError. */
  model(): Promise<GetModelReply__Output> {
    return new Promise((resolve, reject) =>
      this.front.GetModel({}, (error, reply) => (error || !reply ? reject(error) : resolve(reply))),
    );
  }

  /** One layer's experts, mixed: rows [T, H], in the dtype of `hidden`. Rejects with a grpc.ServiceError. */
  forward(layer: number, hidden: Tensor, choice: Choice): Promise<Mixed> {
    const request = {
      layer,
      hidden: message(hidden),
      choice: { ids: message(choice.ids), weights: message(choice.weights) },
    };
    return new Promise((resolve, reject) =>
      this.front.Forward(request, (error, reply) => (error || !reply ? reject(error) : resolve(mixed(reply)))),
    );
  }

  close(): void {
    this.front.close();
  }
}

function message(tensor: Tensor): TensorMessage {
  return { dtype: tensor.dtype, shape: tensor.shape, data: tensor.data };
}

function mixed(reply: ForwardReply__Output): Mixed {
  const hidden = reply.hidden;
  if (hidden === null || hidden.data === undefined) {
    throw new Error("the reply has no rows in it");
  }
  return {
    hidden: { dtype: hidden.dtype as DType, shape: hidden.shape, data: Buffer.from(hidden.data) },
    epoch: reply.epoch,
    weightsVersion: reply.weights_version,
  };
}
