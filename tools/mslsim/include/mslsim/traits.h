// Traits of types, as <metal_type_traits> has them.
#pragma once
#include "types.h"

namespace metal {

template <class T, T v> struct integral_constant { static constexpr T value = v; };
template <bool B> using bool_constant = integral_constant<bool, B>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;

template <class A, class B> struct is_same : false_type {};
template <class A> struct is_same<A, A> : true_type { typedef void yes; };
template <class A, class B> constexpr bool is_same_v = is_same<A, B>::value;

template <bool B, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { typedef T type; };
template <bool B, class T = void> using enable_if_t = typename enable_if<B, T>::type;

template <bool B, class T, class F> struct conditional { typedef T type; };
template <class T, class F> struct conditional<false, T, F> { typedef F type; };
template <bool B, class T, class F> using conditional_t = typename conditional<B, T, F>::type;

template <class T> struct remove_cv { typedef T type; };
template <class T> struct remove_cv<const T> { typedef T type; };
template <class T> using remove_cv_t = typename remove_cv<T>::type;
template <class T> using remove_addrspace_t = remove_cv_t<T>;  // there are none here

template <class T> struct is_integral : false_type {};
#define MSLSIM_INTEGRAL(T) template <> struct is_integral<T> : true_type {};
MSLSIM_INTEGRAL(bool)
MSLSIM_INTEGRAL(char)
MSLSIM_INTEGRAL(signed char)
MSLSIM_INTEGRAL(uchar)
MSLSIM_INTEGRAL(short)
MSLSIM_INTEGRAL(ushort)
MSLSIM_INTEGRAL(int)
MSLSIM_INTEGRAL(uint)
MSLSIM_INTEGRAL(long)
MSLSIM_INTEGRAL(ulong)
#undef MSLSIM_INTEGRAL

}  // namespace metal
