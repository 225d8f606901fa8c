// A pretended accelerator: its "device memory" is host memory, its kernels are those of the CPU, but everything that
// decides where a tensor lives, who waits for whom, and which thread a backward runs in is real: dispatch keys, device
// guards, streams, events, generators, pinned memory and copies that arrive late.
//
// PRETEND_CUDA: it takes the place of CUDA (in a build of torch without CUDA); else it is the PrivateUse1 device "pretended".
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/TensorUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/Generator.h>
#include <torch/extension.h>

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

using namespace at;
using c10::IValue;
using Clock = std::chrono::steady_clock;

namespace {

#ifdef PRETEND_CUDA
constexpr auto KEY = c10::DispatchKey::CUDA;
constexpr auto TYPE = c10::DeviceType::CUDA;
#else
constexpr auto KEY = c10::DispatchKey::PrivateUse1;
constexpr auto TYPE = c10::DeviceType::PrivateUse1;
#endif
constexpr int DEVICES = 2;

// ---- what it counts, and when it refuses --------------------------------------------------------------------------

std::recursive_mutex g_lock;
std::map<std::string, int64_t> g_count;
int g_sync_mode = 0;        // 1: warn, 2: raise
bool g_capturing = false;   // as while a graph is captured
bool g_strict = true;

// ---- time on the device: copies that have not arrived yet ---------------------------------------------------------

thread_local c10::DeviceIndex t_device = 0;
thread_local c10::StreamId t_stream[DEVICES] = {};
uint64_t g_now = 0;
using Where = std::pair<int, c10::StreamId>;
std::map<Where, std::map<Where, uint64_t>> g_seen;  // stream -> what of other streams it has waited for
struct Late { Where where; uint64_t at; std::function<void()> run; };
std::vector<Late> g_late;
std::map<Where, uint64_t> g_done;      // stream -> what the host knows to be over
uint64_t g_device_done[DEVICES] = {};
struct Event {
  Where where; uint64_t at; std::map<Where, uint64_t> seen; Clock::time_point when; bool timing;
  bool done() const { return at <= g_device_done[where.first] || (g_done.count(where) && at <= g_done[where]); }
};

Where here(c10::DeviceIndex d) { return {d, t_stream[d]}; }

void arrive(const std::function<bool(const Late&)>& which) {
  std::vector<Late> rest;
  for (auto& l : g_late) { if (which(l)) l.run(); else rest.push_back(std::move(l)); }
  g_late = std::move(rest);
}
void arrive_stream(Where w) {
  auto& seen = g_seen[w];
  g_done[w] = g_now;
  for (auto& [other, at] : seen) g_done[other] = std::max(g_done[other], at);
  arrive([&](const Late& l) { auto it = seen.find(l.where); return l.where == w || (it != seen.end() && l.at <= it->second); });
}
void arrive_event(Event* e) {
  arrive([&](const Late& l) {
    if (l.where == e->where) return l.at <= e->at;
    auto it = e->seen.find(l.where);
    return it != e->seen.end() && l.at <= it->second;
  });
  g_done[e->where] = std::max(g_done[e->where], e->at);
  for (auto& [other, at] : e->seen) g_done[other] = std::max(g_done[other], at);
}

void waits(const std::string& what, c10::DeviceIndex d) {  // an implicit synchronisation of the current stream
  std::lock_guard<std::recursive_mutex> g(g_lock);
  g_count["sync"]++;
  g_count["sync:" + what]++;
  TORCH_CHECK(!g_capturing, "operation not permitted when stream is capturing: ", what);
  TORCH_CHECK(g_sync_mode != 2, "called a synchronizing CUDA operation (", what, ")");
  if (g_sync_mode == 1) TORCH_WARN("called a synchronizing CUDA operation (", what, ")");
  arrive_stream(here(d));
}

// ---- memory -------------------------------------------------------------------------------------------------------

struct Usage { int64_t now = 0, peak = 0, total = 0, count = 0; };
Usage g_usage[DEVICES];
int64_t g_limit[DEVICES] = {};  // bytes; 0: none
struct Block { void* data; size_t size; int device; };

void free_block(void* p) {
  auto* b = static_cast<Block*>(p);
  { std::lock_guard<std::recursive_mutex> g(g_lock); g_usage[b->device].now -= b->size; g_usage[b->device].count--; }
  free(b->data);
  delete b;
}

struct Alloc final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    auto d = t_device;
    size_t size = (n + 511) / 512 * 512;
    if (!n) return {nullptr, nullptr, &free_null, c10::Device(TYPE, d)};
    std::lock_guard<std::recursive_mutex> g(g_lock);
    auto& u = g_usage[d];
    TORCH_CHECK_WITH(OutOfMemoryError, !g_limit[d] || u.now + (int64_t)size <= g_limit[d], "CUDA out of memory. Tried to allocate ", size, " bytes.");
    u.now += size; u.total += size; u.count++; u.peak = std::max(u.peak, u.now);
    void* data = aligned_alloc(512, size);
    memset(data, 0xff, size);  // NaN: what was not written is not silently zero
    auto* b = new Block{data, size, d};
    return {data, b, &free_block, c10::Device(TYPE, d)};
  }
  static void free_null(void*) {}
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex d) override {
    c10::CachingDeviceAllocator::DeviceStats s;
    auto& u = g_usage[d];
    s.allocated_bytes[0].current = s.reserved_bytes[0].current = u.now;
    s.allocated_bytes[0].peak = s.reserved_bytes[0].peak = u.peak;
    return s;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex d) override { g_usage[d].peak = g_usage[d].now; }
} g_alloc;

std::set<std::pair<char*, char*>> g_pinned;
struct Pinned final : c10::Allocator {
  static void drop(void* p) {
    std::lock_guard<std::recursive_mutex> g(g_lock);
    for (auto it = g_pinned.begin(); it != g_pinned.end(); ++it) if (it->first == p) { g_pinned.erase(it); break; }
    free(p);
  }
  c10::DataPtr allocate(size_t n) override {
    if (!n) return {nullptr, nullptr, &Alloc::free_null, c10::Device(c10::DeviceType::CPU)};
    void* p = aligned_alloc(64, (n + 63) / 64 * 64);
    std::lock_guard<std::recursive_mutex> g(g_lock);
    g_pinned.insert({(char*)p, (char*)p + n});
    return {p, p, &drop, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
} g_pinned_alloc;
bool is_pinned_ptr(const void* p) {
  std::lock_guard<std::recursive_mutex> g(g_lock);
  for (auto& r : g_pinned) if (r.first <= p && p < r.second) return true;
  return false;
}

// ---- devices, streams, events -------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = TYPE;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device d) const override { c10::Device old(TYPE, t_device); setDevice(d); return old; }
  c10::Device getDevice() const override { return {TYPE, t_device}; }
  void setDevice(c10::Device d) const override {
    TORCH_CHECK(d.index() < DEVICES, "CUDA error: invalid device ordinal");
    if (d.index() >= 0) t_device = d.index();
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override { if (d.index() >= 0 && d.index() < DEVICES) t_device = d.index(); }
  c10::Stream make(c10::Device d, c10::StreamId id) const { return c10::Stream(c10::Stream::UNSAFE, c10::Device(TYPE, d.index() < 0 ? t_device : d.index()), id); }
  c10::Stream getStream(c10::Device d) const override { return make(d, t_stream[d.index() < 0 ? t_device : d.index()]); }
  c10::Stream getDefaultStream(c10::Device d) const override { return make(d, 0); }
  c10::Stream getNewStream(c10::Device d, int) const override { static std::atomic<int64_t> next{1}; return make(d, next++); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream exchangeStream(c10::Stream s) const override { auto old = getStream(s.device()); t_stream[s.device_index()] = s.id(); return old; }
  void destroyEvent(void* e, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(e); }
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    std::lock_guard<std::recursive_mutex> g(g_lock);
    Where w{s.device_index(), s.id()};
    if (*event) delete static_cast<Event*>(*event);
    *event = new Event{w, ++g_now, g_seen[w], Clock::now(), flag == c10::EventFlag::BACKEND_DEFAULT};
    g_count["event_record"]++;
  }
  void block(void* event, const c10::Stream& s) const override {
    if (!event) return;
    std::lock_guard<std::recursive_mutex> g(g_lock);
    auto* e = static_cast<Event*>(event);
    auto& seen = g_seen[{s.device_index(), s.id()}];
    seen[e->where] = std::max(seen[e->where], e->at);
    for (auto& [w, at] : e->seen) seen[w] = std::max(seen[w], at);
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    std::lock_guard<std::recursive_mutex> g(g_lock);
    auto* e = static_cast<Event*>(event);
    TORCH_CHECK(!g_capturing, "operation not permitted when stream is capturing: event.query");
    g_count["event_query"]++;
    if (!e->done() && Clock::now() - e->when > std::chrono::milliseconds(2)) arrive_event(e);
    return e->done();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  bool queryStream(const c10::Stream& s) const override { return true; }
  void synchronizeStream(const c10::Stream& s) const override {
    std::lock_guard<std::recursive_mutex> g(g_lock);
    TORCH_CHECK(!g_capturing, "operation not permitted when stream is capturing: synchronize");
    g_count["stream_synchronize"]++;
    arrive_stream({s.device_index(), s.id()});
  }
  bool isStreamCapturing(const c10::Stream&) const override { return g_capturing; }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    std::lock_guard<std::recursive_mutex> g(g_lock);
    TORCH_CHECK(!g_capturing, "operation not permitted when stream is capturing: event.synchronize");
    g_count["event_synchronize"]++;
    arrive_event(static_cast<Event*>(event));
  }
  void synchronizeDevice(const c10::DeviceIndex d) const override {
    std::lock_guard<std::recursive_mutex> g(g_lock);
    TORCH_CHECK(!g_capturing, "operation not permitted when stream is capturing: synchronize");
    g_count["device_synchronize"]++;
    int i = d < 0 ? t_device : d;
    g_device_done[i] = g_now;
    arrive([&](const Late& l) { return l.where.first == i; });
  }
  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override {
    TORCH_CHECK(a && b, "Both events must be recorded before calculating elapsed time.");
    auto *x = static_cast<Event*>(a), *y = static_cast<Event*>(b);
    TORCH_CHECK(x->timing && y->timing, "Both events must be created with argument 'enable_timing=True'.");
    TORCH_CHECK(x->done() && y->done(), "elapsed_time of an event that nobody has waited for (cudaErrorNotReady)");
    return std::chrono::duration<double, std::milli>(y->when - x->when).count();
  }
};
C10_REGISTER_GUARD_IMPL(
#ifdef PRETEND_CUDA
    CUDA,
#else
    PrivateUse1,
#endif
    Guard)

// ---- random numbers -----------------------------------------------------------------------------------------------

struct Gen final : CPUGeneratorImpl {
  explicit Gen(c10::DeviceIndex d, uint64_t seed = c10::detail::getNonDeterministicRandom()) : CPUGeneratorImpl(seed) {
    device_ = c10::Device(TYPE, d);
    key_set_ = c10::DispatchKeySet(KEY);
  }
  uint64_t get_offset() const override { return 0; }  // copying one asks for it
  void set_offset(uint64_t) override {}
  // engine, not the state that `torch.get_rng_state` gives: two private members of the base, copied through its state
};
Generator& default_generator(c10::DeviceIndex d) {
  static Generator all[DEVICES] = {make_generator<Gen>(0, 67280421310721), make_generator<Gen>(1, 67280421310721)};
  return all[d < 0 ? t_device : d];
}
Generator new_generator(c10::DeviceIndex d) { return make_generator<Gen>(d < 0 ? t_device : d, 67280421310721); }

struct BorrowState {  // the CPU's generator stands in for that of the device while a kernel runs
  Generator cpu = at::detail::getDefaultCPUGenerator(), device;
  c10::intrusive_ptr<c10::TensorImpl> kept;
  explicit BorrowState(Generator d) : device(std::move(d)) {
    std::lock_guard<std::mutex> g(cpu.mutex());
    kept = cpu.unsafeGetGeneratorImpl()->get_state();
    cpu.unsafeGetGeneratorImpl()->set_state(*device.unsafeGetGeneratorImpl()->get_state());
  }
  ~BorrowState() {
    std::lock_guard<std::mutex> g(cpu.mutex());
    device.unsafeGetGeneratorImpl()->set_state(*cpu.unsafeGetGeneratorImpl()->get_state());
    cpu.unsafeGetGeneratorImpl()->set_state(*kept);
  }
};

// ---- tensors ------------------------------------------------------------------------------------------------------

bool ours(const Tensor& t) { return t.defined() && t.device().type() == TYPE; }

Tensor as_cpu(const Tensor& t) {  // the same memory, seen from the CPU
  if (!ours(t)) return t;
  auto storage = t.storage();
  c10::DataPtr data(storage.mutable_data(), c10::Device(c10::DeviceType::CPU));
  auto cpu = c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetCPUAllocator(), /*resizable=*/true);
  auto out = at::detail::make_tensor<c10::TensorImpl>(std::move(cpu), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) out.unsafeGetTensorImpl()->set_wrapped_number(true);
  return out;
}

Tensor to_device(const Tensor& cpu, c10::DeviceIndex d) {  // a fresh result of a kernel moves into device memory
  c10::OptionalDeviceGuard guard(c10::Device(TYPE, d));
  auto nbytes = at::detail::computeStorageNbytes(cpu.sizes(), cpu.strides(), cpu.dtype().itemsize());
  auto out = at::detail::empty_strided_generic(cpu.sizes(), cpu.strides(), &g_alloc, c10::DispatchKeySet(KEY), cpu.scalar_type());
  if (nbytes) memcpy(out.mutable_data_ptr(), cpu.const_data_ptr(), nbytes);
  return out;
}

bool is_bool(const IValue& v) {
  if (!v.isTensor() || !v.toTensor().defined()) return false;
  auto s = v.toTensor().scalar_type();
  return s == kBool || s == kByte;
}

void check_waits(const c10::OperatorHandle& op, const std::string& name, const std::vector<IValue>& args, c10::DeviceIndex d) {
  static const std::set<std::string> all = {"aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::_unique", "aten::repeat_interleave", "aten::bincount", "aten::linalg_inv_ex.x", "aten::_linalg_eigh"};
  bool yes = all.count(name);
  if (name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_" || name == "aten::index_put") {
    auto list = args[1];
    if (list.isList()) for (const auto& v : list.toListRef()) yes |= is_bool(v);
  }
  if (yes) waits(name, d);
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  size_t n = schema.arguments().size();
  auto begin = stack->size() - n;
  std::vector<IValue> args(stack->begin() + begin, stack->end());
  std::map<c10::TensorImpl*, Tensor> by_impl;     // CPU view -> ours
  std::vector<std::pair<void*, Tensor>> by_data;
  std::vector<std::pair<Tensor, Tensor>> all;
  c10::DeviceIndex device = -1;
  std::string mixed;
  static const std::set<std::string> no_scalars = {"aten::_amp_foreach_non_finite_check_and_unscale_", "aten::_amp_update_scale_", "aten::_fused_adam_", "aten::_fused_adamw_", "aten::_fused_sgd_", "aten::_fused_adagrad_"};
  auto look = [&](const Tensor& t) -> Tensor {
    if (!t.defined()) return t;
    if (!ours(t)) {
      if (t.device().is_cpu() && (t.dim() > 0 || no_scalars.count(name))) mixed += " cpu" + c10::str(t.sizes());
      return t;
    }
    if (device < 0) device = t.device().index();
    if (t.device().index() != device && !(name.rfind("aten::_foreach", 0) == 0)) mixed += " " + t.device().str() + c10::str(t.sizes());
    auto cpu = as_cpu(t);
    by_impl[cpu.unsafeGetTensorImpl()] = t;
    if (t.storage().nbytes()) by_data.emplace_back(t.storage().mutable_data(), t);
    all.emplace_back(cpu, t);
    return cpu;
  };
  std::optional<Generator> generator;
  for (size_t i = 0; i < n; i++) {
    auto v = args[i];
    if (v.isTensor()) (*stack)[begin + i] = look(v.toTensor());
    else if (v.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : v.toTensorVector()) list.push_back(look(t));
      (*stack)[begin + i] = list;
    } else if (v.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const auto& t : v.toOptionalTensorVector()) list.push_back(t.has_value() ? std::optional<Tensor>(look(*t)) : std::nullopt);
      (*stack)[begin + i] = list;
    } else if (v.isDevice()) {
      if (device < 0 && v.toDevice().type() == TYPE) device = v.toDevice().has_index() ? v.toDevice().index() : t_device;
      (*stack)[begin + i] = c10::Device(c10::kCPU);
    } else if (v.isGenerator()) {
      generator = v.toGenerator();
      TORCH_CHECK(generator->device().type() == TYPE, "Expected a '", c10::DeviceTypeName(TYPE, true), "' device type for generator but found '", generator->device(), "'");
      (*stack)[begin + i] = IValue();
    }
  }
  if (device < 0) device = t_device;
  const auto full = name + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  TORCH_CHECK(!g_strict || mixed.empty(), "Expected all tensors to be on the same device, but ", full, " got ", c10::Device(TYPE, device), " and", mixed);
  check_waits(op, name, args, device);
  {
    std::lock_guard<std::recursive_mutex> g(g_lock);
    g_count["kernels"]++;
    g_count["op:" + full]++;
  }
  auto into_fresh = [&](ScalarType dtype) {  // the kernel writes into an empty tensor, which is copied into `out` then
    auto fresh = at::empty({0}, (*stack)[begin + n - 1].toTensor().options().dtype(dtype));
    auto dev = args[n - 1].toTensor();
    all.erase(std::remove_if(all.begin(), all.end(), [&](auto& p) { return p.second.is_same(dev); }), all.end());
    by_impl[fresh.unsafeGetTensorImpl()] = dev;
    all.emplace_back(fresh, dev);
    (*stack)[begin + n - 1] = fresh;
  };
  // what only CUDA's kernels can: softmax of halves in fp32, and back
  std::optional<ScalarType> cast_result;
  if ((name == "aten::_softmax" || name == "aten::_log_softmax") && n >= 3 && args[2].toBool()) {
    (*stack)[begin] = (*stack)[begin].toTensor().to(kFloat);
    (*stack)[begin + 2] = false;
  } else if (name == "aten::_softmax_backward_data" || name == "aten::_log_softmax_backward_data") {
    auto wanted = static_cast<ScalarType>(args[3].toInt()), has = (*stack)[begin].toTensor().scalar_type();
    if (wanted != has) {
      (*stack)[begin + 3] = static_cast<int64_t>(has);
      if (schema.overload_name() == "out") into_fresh(has); else cast_result = wanted;
    }
  }
  // these resize `out` twice, which is worth a warning where it is not empty: take an empty one
  if (schema.overload_name() == "out" && (name == "aten::mse_loss" || name == "aten::smooth_l1_loss" || name == "aten::huber_loss"))
    into_fresh((*stack)[begin + n - 1].toTensor().scalar_type());
  bool random = false;
  for (auto tag : op.getTags()) random |= tag == at::Tag::nondeterministic_seeded;
  {
    std::optional<BorrowState> state;
    if (random || generator) state.emplace(generator ? *generator : default_generator(device));
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  if (cast_result) stack->back() = stack->back().toTensor().to(*cast_result);
  for (auto& [cpu, dev] : all) {  // `out=` was resized
    if (cpu.sizes() != dev.sizes() || (cpu.numel() && cpu.storage().data() != dev.storage().data())) {
      if (cpu.sizes() == dev.sizes()) { as_cpu(dev).copy_(cpu); continue; }
      auto fresh = to_device(cpu, device);
      dev.unsafeGetTensorImpl()->set_storage_keep_dtype(fresh.storage());
      dev.unsafeGetTensorImpl()->set_sizes_and_strides(fresh.sizes(), fresh.strides(), 0);
    }
  }
  auto back = [&](const Tensor& t) -> Tensor {
    if (!t.defined()) return t;
    auto it = by_impl.find(t.unsafeGetTensorImpl());
    if (it != by_impl.end()) return it->second;
    if (t.storage().nbytes()) for (auto& [data, orig] : by_data) if (t.storage().data() == data) {
      TORCH_CHECK(t.scalar_type() == orig.scalar_type(), "a view of another dtype fell back: ", full);
      return orig.as_strided(t.sizes(), t.strides(), t.storage_offset());
    }
    return to_device(t, device);
  };
  auto out = stack->size() - schema.returns().size();
  for (size_t i = out; i < stack->size(); i++) {
    auto v = (*stack)[i];
    if (v.isTensor()) (*stack)[i] = back(v.toTensor());
    else if (v.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : v.toTensorVector()) list.push_back(back(t));
      (*stack)[i] = list;
    }
  }
}

Tensor empty_memory_format(c10::IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device, std::optional<bool> pin, std::optional<MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &g_alloc, c10::DispatchKeySet(KEY), c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &g_alloc, c10::DispatchKeySet(KEY), c10::dtype_or_default(dtype));
}

Tensor& copy_(Tensor& self, const Tensor& src, bool non_blocking) {
  if (self.is_same(src) || self.numel() == 0) return self;
  const bool to = ours(self), from = ours(src);
  TORCH_CHECK(to || self.device().is_cpu(), "copy to ", self.device());
  TORCH_CHECK(from || src.device().is_cpu(), "copy from ", src.device());
  auto device = to ? self.device().index() : src.device().index();
  auto a = as_cpu(self), b = as_cpu(src);
  if (to && from) {
    a.copy_(b);
    std::lock_guard<std::recursive_mutex> g(g_lock);
    g_count["kernels"]++;
  } else if (to) {
    bool pinned = is_pinned_ptr(src.storage().data());
    TORCH_CHECK(!g_capturing || pinned, "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned.");
    if (!non_blocking) waits("copy host to device", device);
    else { std::lock_guard<std::recursive_mutex> g(g_lock); g_count[pinned ? "h2d_async" : "h2d_pageable"]++; }
    a.copy_(b);
  } else if (!non_blocking) {
    waits("copy device to host", device);
    a.copy_(b);
  } else if (!is_pinned_ptr(self.storage().data())) {
    TORCH_CHECK(!g_capturing, "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned.");
    { std::lock_guard<std::recursive_mutex> g(g_lock); g_count["d2h_pageable"]++; arrive_stream(here(device)); }
    a.copy_(b);
  } else {
    std::lock_guard<std::recursive_mutex> g(g_lock);
    g_count["d2h_async"]++;
    auto value = b.to(self.scalar_type(), false, /*copy=*/true);
    auto target = self.alias();
    if (self.is_contiguous()) memset(self.mutable_data_ptr(), 0xff, self.nbytes());  // poison: who reads too early sees NaN
    g_late.push_back({here(device), ++g_now, [target, value]() mutable { target.copy_(value); }});
  }
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  auto d = dst;
  copy_(d, self, non_blocking);
  return dst;
}
Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  if (self.sizes() != dst.sizes()) dst.resize_(self.sizes());
  auto d = dst;
  copy_(d, self, false);
  return dst;
}

Scalar local_scalar_dense(const Tensor& self) {
  waits("item", self.device().index());
  return as_cpu(self).item();
}

Tensor strided_view(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  auto out = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset.value_or(self.storage_offset()));
  return out;
}
std::vector<int64_t> infer_shape(c10::IntArrayRef size, int64_t numel) {
  auto out = size.vec();
  int64_t known = 1, at = -1;
  for (size_t i = 0; i < out.size(); i++) { if (out[i] == -1) at = i; else known *= out[i]; }
  if (at >= 0) out[at] = known ? numel / known : 0;
  known = 1;
  for (auto s : out) known *= s;
  TORCH_CHECK(known == numel, "shape '", size, "' is invalid for input of size ", numel);
  return out;
}
Tensor view(const Tensor& self, c10::IntArrayRef size) {
  auto shape = infer_shape(size, self.numel());
  auto stride = at::detail::computeStride(self.sizes(), self.strides(), c10::IntArrayRef(shape));
  TORCH_CHECK(stride.has_value(), "view size is not compatible with input tensor's size and stride (at least one dimension spans across two contiguous subspaces). Use .reshape(...) instead.");
  return strided_view(self, shape, *stride, self.storage_offset());
}
Tensor reshape_alias(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) { return strided_view(self, size, stride, std::nullopt); }
Tensor unfold(const Tensor& self, int64_t dim, int64_t size, int64_t step) {
  auto cpu = as_cpu(self).unfold(dim, size, step);
  return strided_view(self, cpu.sizes(), cpu.strides(), cpu.storage_offset());
}
Tensor view_dtype_like(const Tensor& self, const Tensor& cpu) {
  auto out = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), cpu.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
  return out;
}
Tensor view_as_real_(const Tensor& self) { return view_dtype_like(self, at::view_as_real(as_cpu(self))); }
Tensor view_as_complex_(const Tensor& self) { return view_dtype_like(self, at::view_as_complex(as_cpu(self))); }

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) {
    impl->set_sizes_contiguous(size);
    size_t need = (impl->storage_offset() + impl->numel()) * self.dtype().itemsize();
    auto storage = impl->unsafe_storage();
    if (need > storage.nbytes()) {
      c10::OptionalDeviceGuard guard(self.device());
      auto data = g_alloc.allocate(need);
      if (storage.nbytes()) memcpy(data.get(), storage.data(), storage.nbytes());
      storage.set_data_ptr_noswap(std::move(data));
      storage.set_nbytes(need);
    }
  }
  if (format) impl->empty_tensor_restride(*format);
  return self;
}
Tensor& set_source_storage_offset(Tensor& self, c10::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.data() == nullptr || stride.size() != size.size()) { impl->set_storage_offset(offset); impl->set_sizes_contiguous(size); }
  else impl->set_sizes_and_strides(size, stride, offset);
  return self;
}
Tensor& set_source_storage(Tensor& self, c10::Storage source) {
  int64_t n = source.nbytes() / self.dtype().itemsize();
  int64_t one = 1;
  return set_source_storage_offset(self, std::move(source), 0, n, one);
}
Tensor& set_source_tensor(Tensor& self, const Tensor& source) { return set_source_storage_offset(self, source.storage(), source.storage_offset(), source.sizes(), source.strides()); }
Tensor& set_nothing(Tensor& self) {
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, g_alloc.allocate(0), &g_alloc, true);
  int64_t zero = 0, one = 1;
  return set_source_storage_offset(self, none, 0, zero, one);
}
void record_stream(Tensor&, c10::Stream) {}

TORCH_LIBRARY_IMPL(_,
#ifdef PRETEND_CUDA
  CUDA,
#else
  PrivateUse1,
#endif
  m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten,
#ifdef PRETEND_CUDA
  CUDA,
#else
  PrivateUse1,
#endif
  m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("as_strided", strided_view);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("view_as_real", view_as_real_);
  m.impl("view_as_complex", view_as_complex_);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", set_source_storage);
  m.impl("set_.source_Storage_storage_offset", set_source_storage_offset);
  m.impl("set_.source_Tensor", set_source_tensor);
  m.impl("set_", set_nothing);
  m.impl("record_stream", record_stream);
  // else they ask for kernels that only a device of its own has
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

#ifndef PRETEND_CUDA
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at::autocast;
#define _KERNEL_LOW(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(_KERNEL_LOW)
#define _KERNEL_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(_KERNEL_FP32)
#define _KERNEL_SET(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
  AT_FORALL_FP32_SET_OPT_DTYPE(_KERNEL_SET)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
#define _KERNEL_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(_KERNEL_PROMOTE)
}
#endif

// ---- hooks --------------------------------------------------------------------------------------------------------

#ifdef PRETEND_CUDA
struct Hooks final : CUDAHooksInterface {
  bool hasCUDA() const override { return true; }
  int getNumGPUs() const override { return DEVICES; }
  DeviceIndex current_device() const override { return t_device; }
  void deviceSynchronize(DeviceIndex d) const override { Guard().synchronizeDevice(d); }
  Allocator* getCUDADeviceAllocator() const override { return &g_alloc; }
#else
struct Hooks final : PrivateUse1HooksInterface {
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto data = g_alloc.allocate(size);
    if (storage.nbytes()) memcpy(data.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
#endif
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  void setCurrentDevice(DeviceIndex d) const override { Guard().setDevice(c10::Device(TYPE, d)); }
  DeviceIndex getCurrentDevice() const override { return t_device; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { auto old = t_device; setCurrentDevice(d); return old; }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  bool isPinnedPtr(const void* p) const override { return is_pinned_ptr(p); }
  Allocator* getPinnedMemoryAllocator() const override { return &g_pinned_alloc; }
  Device getDeviceFromPtr(void*) const override { return c10::Device(TYPE, t_device); }
  const Generator& getDefaultGenerator(DeviceIndex d) const override { return default_generator(d); }
  Generator getNewGenerator(DeviceIndex d) const override { return new_generator(d); }
};

// A thread of a backward that drops its last reference to Python while Python ends would end the process (of torch's own
// making, on any device): it waits instead, and the process ends as it was about to.
void park_at_the_end() {
#if PY_VERSION_HEX >= 0x030D0000
  bool ends = Py_IsFinalizing();
#else
  bool ends = _Py_IsFinalizing();
#endif
  while (ends || !Py_IsInitialized()) pause();
  abort();
}

void install() {
  std::set_terminate(park_at_the_end);
  static Hooks hooks;
  c10::SetAllocator(TYPE, &g_alloc, 255);
#ifdef PRETEND_CUDA
  // torch has made its empty hooks already and keeps them: give that object the methods of ours, which have no data
  auto* theirs = const_cast<CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  *reinterpret_cast<void**>(theirs) = *reinterpret_cast<void**>(&hooks);
#else
  RegisterPrivateUse1HooksInterface(&hooks);
#endif
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("install", &install);
  m.def("device_count", [] { return DEVICES; });
  m.def("get_device", [] { return (int)t_device; });
  m.def("set_device", [](int d) { Guard().setDevice(c10::Device(TYPE, d)); });
  m.def("exchange_device", [](int d) { int old = t_device; Guard().setDevice(c10::Device(TYPE, d)); return old; });
  m.def("synchronize", [](int d) { Guard().synchronizeDevice(d); });
  m.def("current_stream", [](int d) { return (int64_t)t_stream[d < 0 ? t_device : d]; });
  m.def("set_stream", [](int d, int64_t id) { t_device = d; t_stream[d] = id; });
  m.def("default_generator", [](int d) { return py::reinterpret_steal<py::object>(THPGenerator_initDefaultGenerator(default_generator(d))); });
  m.def("usage", [](int d) { auto& u = g_usage[d]; return std::make_tuple(u.now, u.peak, u.total, u.count); });
  m.def("reset_peak", [](int d) { g_usage[d].peak = g_usage[d].now; });
  m.def("set_limit", [](int d, int64_t n) { g_limit[d] = n; });
  m.def("set_sync_mode", [](int mode) { g_sync_mode = mode; });
  m.def("get_sync_mode", [] { return g_sync_mode; });
  m.def("set_capturing", [](bool yes) { g_capturing = yes; });
  m.def("capturing", [] { return g_capturing; });
  m.def("count", [](const std::string& what) { std::lock_guard<std::recursive_mutex> g(g_lock); g_count[what]++; });
  m.def("counts", [] { std::lock_guard<std::recursive_mutex> g(g_lock); return g_count; });
  m.def("reset_counts", [] { std::lock_guard<std::recursive_mutex> g(g_lock); g_count.clear(); });
  m.def("late", [] { return (int)g_late.size(); });
}
