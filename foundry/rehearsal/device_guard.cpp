// A CUDA device for a torch that was built without CUDA. It has no kernels, memory or streams: tensors on it are those
// of torch's FakeTensorMode, which have shapes only. Torch asks for the guard when a tensor says that it is on "cuda",
// and for the hooks in autograd and autocast. Both must be registered before torch first asks, so before `import torch`.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

// One device, with one stream on which everything is in order.
struct FakeDeviceGuard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Device device() { return Device(DeviceType::CUDA, 0); }
  static Stream stream() { return Stream(Stream::DEFAULT, device()); }

  Device exchangeDevice(Device) const override { return device(); }
  Device getDevice() const override { return device(); }
  Stream getStream(Device) const noexcept override { return stream(); }
  Stream getNewStream(Device, int) const override { return stream(); }
  Stream getDefaultStream(Device) const override { return stream(); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return stream(); }
  Stream exchangeStream(Stream) const noexcept override { return stream(); }

  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, FakeDeviceGuard)

}  // namespace

// The name that torch looks up.
struct CUDAHooks : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  bool isPinnedPtr(const void*) const override { return false; }
};

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)
