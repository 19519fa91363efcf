// Collectives: gloo moves the same bytes. As with NCCL, tensors must be on the device, and a collective runs on a
// stream of its own, which others have to wait for.
#include "collectives.h"

#include "device.h"

#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <vector>

namespace second {
namespace {

using c10d::Work;
using WorkPtr = c10::intrusive_ptr<Work>;
using Tensors = std::vector<at::Tensor>;

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

class OnStream final : public Work {  // gloo's work, with an end that a stream has to wait for
 public:
  OnStream(WorkPtr inner, Queue queue, Tensors results)
      : inner_(std::move(inner)), queue_(queue), end_(seen_by(queue)), results_(std::move(results)) {}
  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  Tensors result() override { return results_; }
  bool wait(std::chrono::milliseconds timeout) override {
    const bool done = inner_->wait(timeout);
    see(current_queue(queue_.first), end_);
    return done;
  }
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { synchronize(); }
  void abort() override { inner_->abort(); }

  // A future of tensors on the device: what waits for it, in DDP's reducer for example, has its stream wait.
  FuturePtr getFuture() override {
    const c10::Device device(kType, static_cast<c10::DeviceIndex>(queue_.first));
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device});
    inner_->getFuture()->addCallback([future, queue = queue_, results = results_](c10::ivalue::Future& inner) {
      if (inner.hasError()) return future->setError(inner.exception_ptr());
      const c10::StreamGuard on_stream_of_collectives(stream_of(queue));
      future->markCompleted(c10::IValue(results));
    });
    return future;
  }

 private:
  WorkPtr inner_;
  Queue queue_;
  Clock end_;
  Tensors results_;
};

class Collectives final : public c10d::Backend {
 public:
  explicit Collectives(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}
  const std::string getBackendName() const override { return "secondccl"; }
  bool supportsCoalescing() const override { return false; }

  WorkPtr broadcast(Tensors& all, const c10d::BroadcastOptions& options) override {
    Call call;
    auto host = call.host(all, true);
    return call.end(gloo_->broadcast(host, options));
  }
  WorkPtr allreduce(Tensors& all, const c10d::AllreduceOptions& options) override {
    Call call;
    auto host = call.host(all, true);
    return call.end(gloo_->allreduce(host, options));
  }
  WorkPtr allreduce_coalesced(Tensors& all, const c10d::AllreduceCoalescedOptions& options) override {
    c10d::AllreduceOptions each;
    each.reduceOp = options.reduceOp, each.timeout = options.timeout;
    return one_by_one(all.size(), [&](size_t i) {
      Tensors one{all[i]};
      return allreduce(one, each);
    });
  }
  WorkPtr reduce(Tensors& all, const c10d::ReduceOptions& options) override {
    Call call;
    auto host = call.host(all, true);
    return call.end(gloo_->reduce(host, options));
  }
  WorkPtr allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    Call call;
    auto from = call.host(in, false);
    std::vector<Tensors> to;
    for (auto& tensors : out) to.push_back(call.host(tensors, true));
    return call.end(gloo_->allgather(to, from, options));
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override {
    Call call;
    auto from = call.host(in, false), to = call.host(out, true);
    return call.end(gloo_->_allgather_base(to, from, options));
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    return one_by_one(out.size(), [&](size_t i) { return _allgather_base(out[i], in[i], options); });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& options) override {
    Call call;
    auto from = call.host(in, false), to = call.host(out, true);
    return call.end(gloo_->_reduce_scatter_base(to, from, options));
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& options) override {
    return one_by_one(out.size(), [&](size_t i) { return _reduce_scatter_base(out[i], in[i], options); });
  }
  WorkPtr scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& options) override {
    Call call;
    std::vector<Tensors> from;
    for (auto& tensors : in) from.push_back(call.host(tensors, false));
    auto to = call.host(out, true);
    return call.end(gloo_->scatter(to, from, options));
  }
  WorkPtr gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& options) override {
    Call call;
    auto from = call.host(in, false);
    std::vector<Tensors> to;
    for (auto& tensors : out) to.push_back(call.host(tensors, true));
    return call.end(gloo_->gather(to, from, options));
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_sizes,
      std::vector<int64_t>& in_sizes, const c10d::AllToAllOptions& options) override {
    Call call;
    auto from = call.host(in, false), to = call.host(out, true);
    return call.end(gloo_->alltoall_base(to, from, out_sizes, in_sizes, options));
  }
  WorkPtr send(Tensors& all, int rank, int tag) override {
    Call call;
    auto host = call.host(all, false);
    return call.end(gloo_->send(host, rank, tag));
  }
  WorkPtr recv(Tensors& all, int rank, int tag) override {
    Call call;
    auto host = call.host(all, true);
    return call.end(gloo_->recv(host, rank, tag));
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override { return gloo_->barrier(options); }

 private:
  struct Call {  // a collective that begins when the current stream has come here
    Queue queue = collective_queue(current_device());
    int64_t work = 0;
    Tensors results;

    at::Tensor host(const at::Tensor& tensor, bool writes) {
      TORCH_CHECK(tensor.device().type() == kType, "Tensors must be on the device and dense");
      TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
      if (!work) {
        queue = collective_queue(tensor.device().index());
        see(queue, seen_by(current_queue(tensor.device().index())));
        work = new_work(queue);
      }
      use(tensor, queue, work, writes, "a collective");
      record_stream(tensor.storage().data(), stream_of(queue));  // c10d keeps tensors until a collective is done
      if (writes) results.push_back(tensor);
      return as_host(tensor);
    }
    Tensors host(const Tensors& tensors, bool writes) {
      Tensors all;
      for (const auto& tensor : tensors) all.push_back(host(tensor, writes));
      return all;
    }
    WorkPtr end(WorkPtr inner) { return c10::make_intrusive<OnStream>(std::move(inner), queue, results); }
  };

  template <typename Make>
  WorkPtr one_by_one(size_t count, Make make) {
    WorkPtr last;
    for (size_t i = 0; i < count; ++i) {
      if (last) last->wait(kNoTimeout);
      last = make(i);
    }
    return last;
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_collectives(c10::intrusive_ptr<c10d::Backend> gloo) {
  return c10::make_intrusive<Collectives>(std::move(gloo));
}

}  // namespace second
