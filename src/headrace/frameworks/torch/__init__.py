"""PyTorch: a drop-in DataLoader, and data sets and a loader over stores.

* dataloader: `DataLoader`, torch's own with headrace's data plane, also in the place of a loader that a library
  built (`adopt`); `dropin`: how it is done
* dataset: `Dataset`, for torch's own loaders and samplers; batches as tensors over headrace's own buffers; a
  user's decode function, with its random numbers
* store_loader: `StoreLoader`, which delivers in headrace's order and resumes exactly
* deliveries: its ways from bytes to batches: whole, on a device, decoded in threads or in worker processes
* device: pixels from page-locked buffers to a GPU
* tokens: `TokenDataLoader`, windows of tokens as tensors
"""
