// What the parts of null CUDA share: points in time, streams, memory, and the one way to queue work.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace null {

// --- when ---

// A point in a stream or in a thread of the host. `seconds` is virtual time. `seen` is a vector clock: of
// every actor (a stream or a thread) how many of its deeds lie behind this point. So one join() serves both.
struct Moment {
    double seconds = 0;
    std::vector<unsigned> seen;

    void join(const Moment &other);
    bool after(int actor, unsigned deed) const { return actor < (int)seen.size() && seen[actor] >= deed; }
};

// Whoever does one thing after the other. deed() counts one more.
struct Actor {
    int number;
    std::string name;
    Moment now;

    explicit Actor(const std::string &name);
    unsigned deed();
};

struct Stream : Actor {
    int device;
    Stream(const std::string &name, int device) : Actor(name), device(device) {}
};

Actor &host();                        // the calling thread; a new one begins where the main thread is by then
Stream &stream_of(cudaStream_t s);    // the handle's, or the current device's default stream
void wait_for(const Moment &moment);  // holds the calling thread up

// --- who touched which bytes (races.cpp) ---

struct Range {
    const void *start;
    size_t bytes;
    bool writes;
};

void touch(Actor &actor, const Range &range, const std::string &what);  // in the actor's latest deed
void forget(const void *start, size_t bytes);  // the memory goes back, and with it what is known

// --- the calling thread ---

int current_device();
cudaError_t failed(cudaError_t e);               // the thread's last error from now on
std::string described(const std::string &what);  // with memo's name of the launch
void synchronize_device();                       // holds it up until all streams of the device are done

// --- memory (memory.cpp) ---

size_t memory_bytes();  // of a device, in all

bool on_device(const void *p);
bool page_locked(const void *p, size_t bytes,
                 bool *crosses = nullptr);  // `crosses`: begins in a registration, ends outside
bool take_device_bytes(
    size_t bytes);  // of the current device, without an address, as a communicator's; false: there is no room
void give_device_bytes(size_t bytes);

// --- what a device does ---

enum Engine { COMPUTE, TO_HOST, TO_DEVICE, NETWORK };  // a device has one engine for each direction of copies

// Queues work of so many seconds that touches `ranges`; the host goes on after a call's time.
void work(Stream &stream, Engine engine, double seconds, const std::vector<Range> &ranges,
          const std::string &what);
double pass_s(double bytes);                   // of a kernel that reads and writes so many bytes
double product_s(double flops, double bytes);  // of a matrix product: what takes longer

// --- settings and counts ---

double setting(const char *name, double otherwise);  // an environment variable
extern std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;

enum Count {
    LAUNCHES,
    BAD_LAUNCHES,
    PRODUCTS,
    COPIES,
    PAGEABLE_COPIES,
    SYNCS,
    EVENTS,
    WAITS,
    MALLOCS,
    FREES,
    REGISTRATIONS,
    MESSAGES,
    PLANS,
    COUNTS
};
extern long long counts[COUNTS];

}  // namespace null
