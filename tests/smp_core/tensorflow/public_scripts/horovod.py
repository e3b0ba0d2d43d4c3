"""Replicas of an automatic partition, a hook, a tape-free step with named axes: a script as written for SMP."""

import argparse

import numpy as np
import smdistributed.modelparallel.tensorflow as smp
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--num_epochs", type=int, default=6)
args = parser.parse_args()

cfg = {
    "microbatches": 2,
    "horovod": True,
    "partitions": 2,
    "pipeline": "interleaved",
    "auto_partition": True,
}
smp.init(cfg)

gpus = tf.config.experimental.list_physical_devices("GPU")
if gpus:
    tf.config.experimental.set_visible_devices(gpus[smp.local_rank()], "GPU")

x = np.linspace(-1.0, 1.0, 64, dtype="float32").reshape(-1, 1)
y = x**2
train_ds = tf.data.Dataset.from_tensor_slices((x, y))
train_ds = train_ds.shard(smp.dp_size(), smp.dp_rank()).batch(32, drop_remainder=True)


class Regression(smp.DistributedModel):
    def __init__(self, hidden=16):
        super().__init__()
        self.hidden = [
            tf.keras.layers.Dense(
                hidden,
                activation="tanh",
                kernel_initializer=tf.keras.initializers.RandomUniform(-1, 1, seed=seed),
            )
            for seed in range(2)
        ]
        self.norm = tf.keras.layers.BatchNormalization()
        self.out = tf.keras.layers.Dense(
            1, kernel_initializer=tf.keras.initializers.RandomUniform(-1, 1, seed=9)
        )

    def call(self, inputs, training=None):
        for layer in self.hidden:
            inputs = layer(inputs)
        return self.out(self.norm(inputs, training=training))


model = Regression()
optimizer = tf.keras.optimizers.SGD(0.05)


@smp.register_post_partition_hook
def after_partition():
    tf.print("partitioned; variables here:", len(model.trainable_variables))


@smp.step(non_split_inputs=["scale"], input_split_axes={"inputs": 0, "targets": 0})
def forward_backward(inputs, targets, scale):
    error = model(inputs, training=True) - targets
    loss = tf.reduce_mean(error * error) * scale
    return loss, optimizer.get_gradients(loss, model.trainable_variables)


@tf.function
def train_step(inputs, targets):
    loss, grads = forward_backward(inputs, targets, tf.constant(1.0))
    grads = [grad.reduce_mean() for grad in grads]
    optimizer.apply_gradients(zip(grads, model.trainable_variables))  # noqa: B905
    return loss.reduce_mean()


for epoch in range(args.num_epochs):
    for batch in train_ds.repeat(5):
        loss = train_step(*batch)
    average = sum(smp.allgather(float(loss), smp.CommGroup.DP_GROUP)) / smp.dp_size()
    if smp.dp_rank() == 0:
        print("epoch", epoch, "loss", average)
print("weights", *(float(tf.reduce_sum(each)) for each in model.trainable_variables))
smp.barrier()
