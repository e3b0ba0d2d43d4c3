"""A checkpoint at each step, restored at the first one, and the whole model in the end: a script as written for SMP."""

import sys

import numpy as np
import smdistributed.modelparallel.tensorflow as smp
import tensorflow as tf

smp.init({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})
folder = sys.argv[1]

random = np.random.RandomState(0)
data = random.standard_normal((64, 6)).astype("float32")
target = data @ random.standard_normal((6, 1)).astype("float32")
train_ds = tf.data.Dataset.from_tensor_slices((data, target)).batch(16).repeat(3)


class Net(smp.DistributedModel):
    def __init__(self):
        super(Net, self).__init__()  # noqa: UP008
        self.first = tf.keras.layers.Dense(8, kernel_initializer="ones")
        self.second = tf.keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, inputs):
        outputs = self.first(inputs)
        with smp.partition(1):
            return self.second(outputs)


model = Net()
optimizer = tf.keras.optimizers.Adam(0.1)
checkpoint = tf.train.Checkpoint(optimizer=optimizer, model=model)
ckpt_manager = smp.CheckpointManager(checkpoint, directory=folder + "/checkpoints", max_to_keep=5)


@smp.step
def get_grads(inputs, targets):
    loss = tf.reduce_mean(tf.square(model(inputs) - targets))
    return optimizer.get_gradients(loss, model.trainable_variables), loss


@tf.function
def train_step(inputs, targets):
    gradients, loss = get_grads(inputs, targets)
    gradients = [g.accumulate(method="add_n") for g in gradients]
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))  # noqa: B905
    return loss.reduce_mean()


for step, inputs in enumerate(train_ds):
    if step == 0:
        ckpt_manager.restore()
    loss = train_step(*inputs)
    print("step", step, "loss", loss.numpy())
    ckpt_manager.save()

model.save_model(folder + "/model")
